package io.github.headrace;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.time.Duration;

/**
 * The real server that tests/clients/test_java_client.py started, and the proxy before it whose
 * connections can be cut.
 */
final class TestServer {
    static final String VARIABLE = "HEADRACE_TEST_SERVER";
    static final String ADDRESS = System.getenv(VARIABLE);
    static final String PROXY = System.getenv("HEADRACE_TEST_PROXY");
    static final RetryPolicy FAST =
            new RetryPolicy(20, Duration.ofMillis(20), Duration.ofMillis(200), 2.0);

    private TestServer() {}

    static HeadraceClient client() {
        return HeadraceClient.builder(ADDRESS).build();
    }

    static HeadraceClient proxied(int channels) {
        return HeadraceClient.builder(PROXY).retry(FAST).channels(channels).build();
    }

    /** Resets all connections of the proxy; returns how many there were. */
    static int cut() {
        String[] control = System.getenv("HEADRACE_TEST_CUT").split(":");
        try (Socket socket = new Socket(control[0], Integer.parseInt(control[1]));
                BufferedReader answer = new BufferedReader(
                        new InputStreamReader(socket.getInputStream(), StandardCharsets.US_ASCII))) {
            return Integer.parseInt(answer.readLine());
        } catch (IOException unreachable) {
            throw new AssertionError("the proxy's control port does not answer", unreachable);
        }
    }

    /** Greedy, and as long as asked for. */
    static GenerationOptions.Builder exactly(int tokens) {
        return GenerationOptions.builder().temperature(0).maxTokens(tokens).ignoreEos(true);
    }

    /** Waits for the end of a request, and returns its row of the list. */
    static RequestSummary untilFinished(HeadraceClient client, String id) throws InterruptedException {
        RequestFilter finished = RequestFilter.ALL.state(RequestState.FINISHED);
        while (true) {
            for (RequestSummary row : client.listRequests(finished)) {
                if (row.requestId().equals(id)) {
                    return row;
                }
            }
            Thread.sleep(20);
        }
    }
}
