package io.github.headrace;

import io.github.headrace.v1.SubmitResponse;

/**
 * A generation that outlives its readers; its id goes to subscribe and cancel.
 *
 * @param requestId the request's name
 * @param modelRevision name and content hash of the model that answers
 * @param promptTokens length of the prompt in tokens
 * @param existing whether the idempotency key was known and this is an earlier request
 */
public record Submitted(String requestId, String modelRevision, int promptTokens, boolean existing) {

    static Submitted from(SubmitResponse response) {
        return new Submitted(
                response.getRequestId(),
                response.getModelRevision(),
                response.getPromptTokens(),
                response.getExisting());
    }
}
