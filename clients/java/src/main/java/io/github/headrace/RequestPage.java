package io.github.headrace;

import io.github.headrace.v1.ListRequestsResponse;
import java.util.List;

/**
 * One page of the caller's requests.
 *
 * @param requests newest first
 * @param nextPageToken to be given for the next page; empty on the last one
 */
public record RequestPage(List<RequestSummary> requests, String nextPageToken) {

    static RequestPage from(ListRequestsResponse response) {
        return new RequestPage(
                response.getRequestsList().stream().map(RequestSummary::from).toList(), response.getNextPageToken());
    }
}
