package io.github.headrace;

import io.github.headrace.v1.SubscribeRequest;
import io.github.headrace.v1.SubscribeResponse;
import java.util.concurrent.Flow;

/**
 * The streams as publishers. Each subscriber gets a call of its own, which begins as it subscribes
 * and is cancelled by {@code cancel()}.
 *
 * <p>Back-pressure is real: a message is read from the connection only against an event asked for
 * with {@code request(n)}, so that a slow subscriber slows the server down. Failed calls end in
 * {@code onError} with a {@link HeadraceException}.
 */
public final class FlowHeadraceClient {
    private final Transport transport;
    private final Timeouts timeouts;

    FlowHeadraceClient(Transport transport, Timeouts timeouts) {
        this.transport = transport;
        this.timeouts = timeouts;
    }

    /**
     * The answer to a prompt; each subscriber's is generated for itself.
     *
     * @param prompt text to continue
     * @param options how to generate
     * @return a cold publisher
     */
    public Flow.Publisher<GenerationEvent> generate(String prompt, GenerationOptions options) {
        return generate(Prompt.text(prompt), options);
    }

    /**
     * The answer to a prompt; each subscriber's is generated for itself.
     *
     * @param prompt what to continue
     * @param options how to generate
     * @return a cold publisher
     */
    public Flow.Publisher<GenerationEvent> generate(Prompt prompt, GenerationOptions options) {
        return publisher(Calls.generate(prompt, options));
    }

    /**
     * The answer to a conversation; each subscriber's is generated for itself.
     *
     * @param conversation what to answer, or to continue
     * @param options how to generate
     * @return a cold publisher
     */
    public Flow.Publisher<GenerationEvent> chat(Conversation conversation, GenerationOptions options) {
        return publisher(Calls.chat(conversation, options));
    }

    /**
     * All outputs of a submitted or running generation. Continues over broken connections, see
     * {@link HeadraceClient#subscribe(String, int)}; cancelling only detaches.
     *
     * @param requestId from submit, or from an accepted event
     * @param fromToken the first token wanted in each output
     * @return a cold publisher
     */
    public Flow.Publisher<GenerationEvent> subscribe(String requestId, int fromToken) {
        return subscription(Calls.subscribe(requestId, fromToken, null));
    }

    /**
     * One output of a submitted or running generation; else as {@link #subscribe(String, int)}.
     *
     * @param requestId from submit, or from an accepted event
     * @param fromToken the first token wanted
     * @param outputIndex which of the n outputs
     * @return a cold publisher
     */
    public Flow.Publisher<GenerationEvent> subscribe(String requestId, int fromToken, int outputIndex) {
        return subscription(Calls.subscribe(requestId, fromToken, outputIndex));
    }

    private Flow.Publisher<GenerationEvent> subscription(StreamCall<SubscribeRequest, SubscribeResponse> call) {
        return new EventPublisher(
                transport, () -> new SubscriptionState(call, timeouts.start(true), transport.retry()));
    }

    private Flow.Publisher<GenerationEvent> publisher(StreamCall<?, ?> call) {
        return new EventPublisher(transport, () -> new StreamState(call, timeouts.start(true)));
    }
}
