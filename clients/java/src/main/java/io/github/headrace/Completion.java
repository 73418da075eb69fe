package io.github.headrace;

import java.util.List;
import java.util.Optional;

/**
 * A whole answer. The methods speak of the first output, which is the only one unless n was asked
 * for.
 *
 * @param requestId names the request in logs and traces
 * @param modelRevision name and content hash of the model that answered
 * @param outputs by index, at least one
 * @param usage tokens counted
 * @param ledger where the time went
 * @param promptLogprobs of the prompt from position 1 on, where they were asked for
 */
public record Completion(
        String requestId,
        String modelRevision,
        List<Output> outputs,
        Usage usage,
        Ledger ledger,
        Optional<Logprobs> promptLogprobs) {

    /**
     * Text of the first output.
     *
     * @return all of it
     */
    public String text() {
        return outputs.get(0).text();
    }

    /**
     * Functions that the first output called.
     *
     * @return all of them, in order
     */
    public List<ToolCall> toolCalls() {
        return outputs.get(0).toolCalls();
    }

    /**
     * The first output as a message of a conversation that goes on.
     *
     * @return the assistant's message
     */
    public ChatMessage message() {
        return outputs.get(0).message();
    }

    /**
     * Tokens of the first output.
     *
     * @return all of them
     */
    public List<Integer> tokenIds() {
        return outputs.get(0).tokenIds();
    }

    /**
     * Why the first output ended.
     *
     * @return never {@link FinishReason#ERROR}, which is thrown instead
     */
    public FinishReason finishReason() {
        return outputs.get(0).finishReason();
    }

    /**
     * Log probabilities of the first output.
     *
     * @return empty where they were not asked for
     */
    public Optional<Logprobs> logprobs() {
        return outputs.get(0).logprobs();
    }
}
