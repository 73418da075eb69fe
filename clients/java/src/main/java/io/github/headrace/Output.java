package io.github.headrace;

import java.util.List;
import java.util.Optional;

/**
 * One of the n outputs, whole.
 *
 * @param outputIndex which of the n outputs, from 0
 * @param text all of its text
 * @param tokenIds all of its tokens
 * @param finishReason why it ended
 * @param matchedStop what matched, where a stop token or stop string did
 * @param logprobs of its tokens, where they were asked for
 * @param score what it was chosen by, where {@link GenerationOptions.Builder#bestOf} or
 *     {@link GenerationOptions.Builder#beamSearch} has outputs chosen
 * @param reasoning what the model wrote for itself; may be empty
 * @param toolCalls the functions that it called
 */
public record Output(
        int outputIndex,
        String text,
        List<Integer> tokenIds,
        FinishReason finishReason,
        Optional<MatchedStop> matchedStop,
        Optional<Logprobs> logprobs,
        Optional<Float> score,
        String reasoning,
        List<ToolCall> toolCalls) {

    /**
     * This output as the assistant's message of a conversation that goes on.
     *
     * @return the message
     */
    public ChatMessage message() {
        return new ChatMessage(ChatMessage.Role.ASSISTANT, text, toolCalls, "", reasoning);
    }
}
