package io.github.headrace;

import java.time.Instant;
import java.util.List;

/**
 * One request of a list.
 *
 * @param requestId the request's name
 * @param state where it is in its life
 * @param createTime when the engine accepted it
 * @param promptTokens length of the prompt in tokens
 * @param outputTokens tokens generated so far, all outputs together
 * @param finishReasons why each output ended; empty while it runs
 * @param detached whether it was made by submit and outlives its readers
 * @param model name of the model that answers
 */
public record RequestSummary(
        String requestId,
        RequestState state,
        Instant createTime,
        int promptTokens,
        int outputTokens,
        List<FinishReason> finishReasons,
        boolean detached,
        String model) {

    static RequestSummary from(io.github.headrace.v1.RequestSummary row) {
        return new RequestSummary(
                row.getRequestId(),
                RequestState.from(row.getState()),
                Instant.ofEpochSecond(
                        row.getCreateTime().getSeconds(), row.getCreateTime().getNanos()),
                row.getPromptTokens(),
                row.getOutputTokens(),
                row.getFinishReasonsList().stream().map(FinishReason::from).toList(),
                row.getDetached(),
                row.getModel());
    }
}
