package io.github.headrace;

import java.util.ArrayList;
import java.util.List;

/** A piece of what an output says: text of the answer, reasoning, or a part of a call. */
public sealed interface Content {

    /**
     * Text of the answer.
     *
     * @param text some characters
     */
    record AnswerText(String text) implements Content {}

    /**
     * Text that the model wrote for itself, before the answer.
     *
     * @param text some characters
     */
    record ReasoningText(String text) implements Content {}

    /**
     * The model began to call a function.
     *
     * @param index which of the output's calls, from 0
     * @param id names the call in the message that brings its result
     * @param name the function
     */
    record ToolCallStarted(int index, String id, String name) implements Content {}

    /**
     * More of a call's arguments.
     *
     * @param index which of the output's calls, from 0
     * @param delta what follows of the arguments' JSON text
     */
    record ToolCallArguments(int index, String delta) implements Content {}

    /**
     * A call is over.
     *
     * @param index which of the output's calls, from 0
     * @param arguments all of the arguments' JSON text
     * @param valid whether the call names one of the request's tools, and its arguments are one JSON
     *     object
     */
    record ToolCallFinished(int index, String arguments, boolean valid) implements Content {}

    /**
     * The contents of a delta.
     *
     * @param contents as the server sent them
     * @return in order; empty for a delta that is text alone
     */
    static List<Content> from(List<io.github.headrace.v1.Content> contents) {
        List<Content> made = new ArrayList<>();
        boolean isText = true;
        for (io.github.headrace.v1.Content content : contents) {
            isText = isText && content.hasText();
            switch (content.getKindCase()) {
                case TEXT -> made.add(new AnswerText(content.getText()));
                case REASONING -> made.add(new ReasoningText(content.getReasoning()));
                case TOOL_CALL_STARTED -> made.add(new ToolCallStarted(
                        content.getToolCallStarted().getIndex(),
                        content.getToolCallStarted().getId(),
                        content.getToolCallStarted().getName()));
                case TOOL_CALL_ARGUMENTS -> made.add(new ToolCallArguments(
                        content.getToolCallArguments().getIndex(),
                        content.getToolCallArguments().getDelta()));
                case TOOL_CALL_FINISHED -> made.add(new ToolCallFinished(
                        content.getToolCallFinished().getIndex(),
                        content.getToolCallFinished().getArguments(),
                        content.getToolCallFinished().getValid()));
                case KIND_NOT_SET -> {
                    // Of a kind that is newer than this client.
                }
            }
        }
        return isText ? List.of() : List.copyOf(made);
    }

    /**
     * How long this is: a character counts one, as do the beginning and the end of a call.
     *
     * @return at least 0
     */
    default int length() {
        if (this instanceof AnswerText answer) {
            return answer.text.length();
        } else if (this instanceof ReasoningText reasoning) {
            return reasoning.text.length();
        } else if (this instanceof ToolCallArguments arguments) {
            return arguments.delta.length();
        }
        return 1;
    }

    /**
     * This without its first characters.
     *
     * @param known how many of them, less than all
     * @return what is left
     */
    default Content without(int known) {
        if (this instanceof AnswerText answer) {
            return new AnswerText(answer.text.substring(known));
        } else if (this instanceof ReasoningText reasoning) {
            return new ReasoningText(reasoning.text.substring(known));
        } else if (this instanceof ToolCallArguments arguments) {
            return new ToolCallArguments(arguments.index, arguments.delta.substring(known));
        }
        return this;
    }
}
