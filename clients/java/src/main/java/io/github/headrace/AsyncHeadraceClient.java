package io.github.headrace;

import java.util.Collection;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Flow;
import java.util.function.Consumer;

/**
 * The calls as futures. Cancelling a future cancels its call; a failed call completes it with a
 * {@link HeadraceException}. What cannot be sent at all is thrown at once, as {@link
 * InvalidRequestException}.
 *
 * <p>Futures complete on gRPC's threads, or those of {@link HeadraceClientBuilder#executor}.
 */
public final class AsyncHeadraceClient {
    private final Transport transport;
    private final Timeouts timeouts;

    AsyncHeadraceClient(Transport transport, Timeouts timeouts) {
        this.transport = transport;
        this.timeouts = timeouts;
    }

    /**
     * What an operator does to the server.
     *
     * @return a view on the same connections
     */
    public AsyncAdminClient admin() {
        return new AsyncAdminClient(transport, timeouts);
    }

    /**
     * The whole answer to a prompt, and its events as they come.
     *
     * @param prompt what to continue
     * @param options how to generate
     * @param reader gets each event in turn; the next one is read when it returns
     * @return the answer
     */
    public CompletableFuture<Completion> generate(
            Prompt prompt, GenerationOptions options, Consumer<? super GenerationEvent> reader) {
        return read(new FlowHeadraceClient(transport, timeouts).generate(prompt, options), reader);
    }

    /**
     * The whole answer to a conversation, and its events as they come.
     *
     * @param conversation what to answer, or to continue
     * @param options how to generate
     * @param reader gets each event in turn; the next one is read when it returns
     * @return the answer
     */
    public CompletableFuture<Completion> chat(
            Conversation conversation, GenerationOptions options, Consumer<? super GenerationEvent> reader) {
        return read(new FlowHeadraceClient(transport, timeouts).chat(conversation, options), reader);
    }

    /**
     * What there is of a submitted or running generation from a token on, and its events as they
     * come, over broken connections.
     *
     * @param requestId from submit, or from an accepted event
     * @param fromToken the first token wanted in each output
     * @param reader gets each event in turn; the next one is read when it returns
     * @return the answer from that token on; cancelling it only detaches
     */
    public CompletableFuture<Completion> subscribe(
            String requestId, int fromToken, Consumer<? super GenerationEvent> reader) {
        return read(new FlowHeadraceClient(transport, timeouts).subscribe(requestId, fromToken), reader);
    }

    /**
     * The whole answer to a prompt, in one message.
     *
     * @param prompt what to continue
     * @param options how to generate
     * @return the answer
     */
    public CompletableFuture<Completion> complete(Prompt prompt, GenerationOptions options) {
        return transport.callAsync(Calls.complete(prompt, options), timeouts);
    }

    /**
     * Starts a generation that outlives its readers.
     *
     * @param prompt what to continue
     * @param options how to generate
     * @param idempotencyKey the same key and spec is the same request; null: one is drawn
     * @return its id
     */
    public CompletableFuture<Submitted> submit(Prompt prompt, GenerationOptions options, String idempotencyKey) {
        return transport.callAsync(Calls.submit(prompt, options, idempotencyKey), timeouts);
    }

    /**
     * Ends a generation.
     *
     * @param requestId from submit, or from an accepted event
     * @return whether it was still waiting or running
     */
    public CompletableFuture<Boolean> cancel(String requestId) {
        return transport.callAsync(Calls.cancel(requestId), timeouts);
    }

    /**
     * One page of the caller's own generations, newest first.
     *
     * @param filter which of them
     * @param pageToken from the page before; empty for the first one
     * @return the page
     */
    public CompletableFuture<RequestPage> listRequests(RequestFilter filter, String pageToken) {
        return transport.callAsync(Calls.listRequests(filter, pageToken), timeouts);
    }

    /**
     * Text to token ids.
     *
     * @param text the text
     * @param addSpecialTokens whether the tokenizer adds its special tokens
     * @param model name of the model; empty: the default model
     * @return the tokens
     */
    public CompletableFuture<List<Integer>> tokenize(String text, boolean addSpecialTokens, String model) {
        return transport.callAsync(Calls.tokenize(text, addSpecialTokens, model), timeouts);
    }

    /**
     * Token ids to text.
     *
     * @param tokenIds the tokens
     * @param skipSpecialTokens whether special tokens are left out of the text
     * @param model name of the model; empty: the default model
     * @return the text
     */
    public CompletableFuture<String> detokenize(
            Collection<Integer> tokenIds, boolean skipSpecialTokens, String model) {
        return transport.callAsync(Calls.detokenize(tokenIds, skipSpecialTokens, model), timeouts);
    }

    /**
     * What one model is and what it allows.
     *
     * @param model name of the model; empty: the default model
     * @return the model
     */
    public CompletableFuture<Model> getModel(String model) {
        return transport.callAsync(Calls.getModel(model), timeouts);
    }

    /**
     * The models of the server.
     *
     * @return by name
     */
    public CompletableFuture<List<Model>> listModels() {
        return transport.callAsync(Calls.listModels(), timeouts);
    }

    /**
     * How busy the server is.
     *
     * @param model name of the model; empty: the default model
     * @return the load at that moment
     */
    public CompletableFuture<Load> load(String model) {
        return transport.callAsync(Calls.load(model), timeouts);
    }

    private static CompletableFuture<Completion> read(
            Flow.Publisher<GenerationEvent> events, Consumer<? super GenerationEvent> reader) {
        CompletableFuture<Completion> future = new CompletableFuture<>();
        events.subscribe(new Collector(future, reader));
        return future;
    }

    /** Reads a stream to its end into a future. */
    private static final class Collector implements Flow.Subscriber<GenerationEvent> {
        private final CompletableFuture<Completion> future;
        private final Consumer<? super GenerationEvent> reader;
        private final Transcript transcript = new Transcript();
        private Flow.Subscription subscription;

        Collector(CompletableFuture<Completion> future, Consumer<? super GenerationEvent> reader) {
            this.future = future;
            this.reader = reader;
        }

        @Override
        public void onSubscribe(Flow.Subscription given) {
            subscription = given;
            future.whenComplete((answer, failed) -> given.cancel());
            given.request(1);
        }

        @Override
        public void onNext(GenerationEvent event) {
            transcript.add(event);
            reader.accept(event);
            subscription.request(1);
        }

        @Override
        public void onError(Throwable failed) {
            future.completeExceptionally(failed);
        }

        @Override
        public void onComplete() {
            try {
                future.complete(transcript.completion());
            } catch (HeadraceException failed) {
                future.completeExceptionally(failed);
            }
        }
    }
}
