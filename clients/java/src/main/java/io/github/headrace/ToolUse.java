package io.github.headrace;

import io.github.headrace.v1.ToolChoice;
import io.github.headrace.v1.ToolChoiceMode;
import java.util.List;
import java.util.stream.IntStream;

/**
 * The functions that a conversation offers its model.
 *
 * @param tools at most 128
 * @param choice whether the model calls them: "auto", "none", "required", or the name of the one
 *     that it must call
 * @param parallel whether one output may call several
 */
public record ToolUse(List<Tool> tools, String choice, boolean parallel) {

    /**
     * Copies the tools.
     *
     * @param tools at most 128
     * @param choice whether the model calls them
     * @param parallel whether one output may call several
     */
    public ToolUse {
        tools = List.copyOf(tools);
    }

    /**
     * Functions that the model calls as it likes.
     *
     * @param tools at most 128
     * @return the tools
     */
    public static ToolUse of(Tool... tools) {
        return new ToolUse(List.of(tools), "auto", true);
    }

    List<io.github.headrace.v1.Tool> messages() {
        return IntStream.range(0, tools.size())
                .mapToObj(index -> tools.get(index).message("tools[" + index + "]"))
                .toList();
    }

    ToolChoice choiceMessage() {
        ToolChoice.Builder message = ToolChoice.newBuilder();
        return switch (choice) {
            case "auto" -> message.setMode(ToolChoiceMode.TOOL_CHOICE_MODE_AUTO).build();
            case "none" -> message.setMode(ToolChoiceMode.TOOL_CHOICE_MODE_NONE).build();
            case "required" -> message.setMode(ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED)
                    .build();
            default -> message.setName(Wire.utf8("tool_choice.name", choice)).build();
        };
    }
}
