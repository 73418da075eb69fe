package io.github.headrace;

import io.github.headrace.v1.SubscribeRequest;
import io.github.headrace.v1.SubscribeResponse;
import java.time.Duration;
import java.util.Collection;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;
import java.util.Objects;

/**
 * A connection to a Headrace server, with calls that block. Safe to share between threads.
 *
 * <p>{@link #async} has the same calls as futures, {@link #flow} as publishers, {@link #admin}
 * those of an operator; all of them, and the views of {@link #withTimeout}, share this client's
 * connections and end with it. Failed calls throw {@link HeadraceException}.
 */
public final class HeadraceClient implements AutoCloseable {
    private final Transport transport;
    private final Timeouts timeouts;

    HeadraceClient(Transport transport, Timeouts timeouts) {
        this.transport = transport;
        this.timeouts = timeouts;
    }

    /**
     * Prepares a client.
     *
     * @param target {@code host:port}, {@code unix:/path} or any other gRPC target
     * @return a builder
     */
    public static HeadraceClientBuilder builder(String target) {
        return new HeadraceClientBuilder(target);
    }

    /**
     * This client with a timeout for every call, streams too. The timeout of a generation is also
     * its deadline on the server.
     *
     * @param timeout for each call, from its beginning; that of a subscription includes
     *     reconnections
     * @return a view on this client's connections
     */
    public HeadraceClient withTimeout(Duration timeout) {
        return new HeadraceClient(transport, new Timeouts(timeouts.quick(), Objects.requireNonNull(timeout)));
    }

    /**
     * The calls of this client as futures.
     *
     * @return a view on this client's connections
     */
    public AsyncHeadraceClient async() {
        return new AsyncHeadraceClient(transport, timeouts);
    }

    /**
     * The streams as publishers with back-pressure.
     *
     * @return a view on this client's connections
     */
    public FlowHeadraceClient flow() {
        return new FlowHeadraceClient(transport, timeouts);
    }

    /**
     * What an operator does to the server.
     *
     * @return a view on this client's connections
     */
    public AdminClient admin() {
        return new AdminClient(transport, timeouts);
    }

    /**
     * Streams the answer to a prompt, with default options.
     *
     * @param prompt text to continue
     * @return to be closed by the caller
     */
    public GenerationStream generate(String prompt) {
        return generate(prompt, GenerationOptions.defaults());
    }

    /**
     * Streams the answer to a prompt.
     *
     * @param prompt text to continue
     * @param options how to generate
     * @return to be closed by the caller
     */
    public GenerationStream generate(String prompt, GenerationOptions options) {
        return generate(Prompt.text(prompt), options);
    }

    /**
     * Streams the answer to a prompt.
     *
     * @param prompt what to continue
     * @param options how to generate
     * @return to be closed by the caller
     * @throws InvalidRequestException a value that cannot be sent; what the server refuses is
     *     thrown by the stream
     */
    public GenerationStream generate(Prompt prompt, GenerationOptions options) {
        return stream(Calls.generate(prompt, options));
    }

    /**
     * Streams the answer to a message, with default options.
     *
     * @param message what the person says
     * @return to be closed by the caller
     */
    public GenerationStream chat(String message) {
        return chat(Conversation.of(message), GenerationOptions.defaults());
    }

    /**
     * Streams the answer to a conversation.
     *
     * @param messages oldest first
     * @param options how to generate
     * @return to be closed by the caller
     */
    public GenerationStream chat(List<ChatMessage> messages, GenerationOptions options) {
        return chat(Conversation.of(messages), options);
    }

    /**
     * Streams the answer to a conversation.
     *
     * @param conversation what to answer, or to continue
     * @param options how to generate
     * @return to be closed by the caller
     */
    public GenerationStream chat(Conversation conversation, GenerationOptions options) {
        return stream(Calls.chat(conversation, options));
    }

    /**
     * The whole answer to a prompt, in one message.
     *
     * @param prompt text to continue
     * @param options how to generate
     * @return the answer
     */
    public Completion complete(String prompt, GenerationOptions options) {
        return complete(Prompt.text(prompt), options);
    }

    /**
     * The whole answer to a prompt, in one message.
     *
     * @param prompt what to continue
     * @param options how to generate
     * @return the answer
     */
    public Completion complete(Prompt prompt, GenerationOptions options) {
        return transport.call(Calls.complete(prompt, options), timeouts);
    }

    /**
     * Starts a generation that outlives its readers; read it with subscribe, end it with cancel.
     *
     * @param prompt text to continue
     * @param options how to generate
     * @return its id
     */
    public Submitted submit(String prompt, GenerationOptions options) {
        return submit(Prompt.text(prompt), options, null);
    }

    /**
     * Starts a generation that outlives its readers; read it with subscribe, end it with cancel.
     *
     * @param prompt what to continue
     * @param options how to generate
     * @param idempotencyKey the same key and spec is the same request; null: one is drawn, so that
     *     sending the call again starts nothing twice
     * @return its id
     */
    public Submitted submit(Prompt prompt, GenerationOptions options, String idempotencyKey) {
        return transport.call(Calls.submit(prompt, options, idempotencyKey), timeouts);
    }

    /**
     * Reads all outputs of a submitted or running generation, from their first token on.
     *
     * @param requestId from submit, or from an accepted event
     * @return to be closed by the caller; continues over broken connections
     */
    public GenerationStream subscribe(String requestId) {
        return subscribe(requestId, 0);
    }

    /**
     * Reads all outputs of a submitted or running generation. A broken connection is opened again,
     * and the stream continues from the last token, after a {@link GenerationEvent.Reconnecting}
     * event.
     *
     * @param requestId from submit, or from an accepted event
     * @param fromToken the first token wanted in each output
     * @return to be closed by the caller
     */
    public GenerationStream subscribe(String requestId, int fromToken) {
        return subscription(Calls.subscribe(requestId, fromToken, null));
    }

    /**
     * Reads one output of a submitted or running generation; else as {@link #subscribe(String,
     * int)}.
     *
     * @param requestId from submit, or from an accepted event
     * @param fromToken the first token wanted
     * @param outputIndex which of the n outputs
     * @return to be closed by the caller
     */
    public GenerationStream subscribe(String requestId, int fromToken, int outputIndex) {
        return subscription(Calls.subscribe(requestId, fromToken, outputIndex));
    }

    /**
     * Many generations over one call, for gateways.
     *
     * @return to be closed by the caller
     */
    public Session session() {
        return new Session(transport, timeouts.start(true));
    }

    /**
     * Ends a generation.
     *
     * @param requestId from submit, or from an accepted event
     * @return whether it was still waiting or running
     */
    public boolean cancel(String requestId) {
        return transport.call(Calls.cancel(requestId), timeouts);
    }

    /**
     * All of the caller's own generations, newest first.
     *
     * @return fetched page by page, anew for each iterator
     */
    public Iterable<RequestSummary> listRequests() {
        return listRequests(RequestFilter.ALL);
    }

    /**
     * The caller's own generations, newest first.
     *
     * @param filter which of them
     * @return fetched page by page, anew for each iterator
     */
    public Iterable<RequestSummary> listRequests(RequestFilter filter) {
        return () -> new Pages(filter);
    }

    /**
     * Text to token ids of the default model, with its special tokens.
     *
     * @param text the text
     * @return the tokens
     */
    public List<Integer> tokenize(String text) {
        return tokenize(text, true, "");
    }

    /**
     * Text to token ids.
     *
     * @param text the text
     * @param addSpecialTokens whether the tokenizer adds its special tokens, such as
     *     beginning-of-text
     * @param model name of the model; empty: the default model
     * @return the tokens
     */
    public List<Integer> tokenize(String text, boolean addSpecialTokens, String model) {
        return transport.call(Calls.tokenize(text, addSpecialTokens, model), timeouts);
    }

    /**
     * Token ids of the default model to text, without special tokens.
     *
     * @param tokenIds the tokens
     * @return the text
     */
    public String detokenize(Collection<Integer> tokenIds) {
        return detokenize(tokenIds, true, "");
    }

    /**
     * Token ids to text.
     *
     * @param tokenIds the tokens
     * @param skipSpecialTokens whether special tokens are left out of the text
     * @param model name of the model; empty: the default model
     * @return the text
     */
    public String detokenize(Collection<Integer> tokenIds, boolean skipSpecialTokens, String model) {
        return transport.call(Calls.detokenize(tokenIds, skipSpecialTokens, model), timeouts);
    }

    /**
     * What the default model is and what it allows.
     *
     * @return the model
     */
    public Model getModel() {
        return getModel("");
    }

    /**
     * What one model is and what it allows.
     *
     * @param model name of the model; empty: the default model
     * @return the model
     */
    public Model getModel(String model) {
        return transport.call(Calls.getModel(model), timeouts);
    }

    /**
     * The models of the server.
     *
     * @return by name
     */
    public List<Model> listModels() {
        return transport.call(Calls.listModels(), timeouts);
    }

    /**
     * How busy the server is with its default model.
     *
     * @return the load at this moment
     */
    public Load load() {
        return load("");
    }

    /**
     * How busy the server is.
     *
     * @param model name of the model; empty: the default model
     * @return the load at this moment
     */
    public Load load(String model) {
        return transport.call(Calls.load(model), timeouts);
    }

    /** Closes the connections; calls that still run are cancelled. */
    @Override
    public void close() {
        transport.close();
    }

    private GenerationStream stream(StreamCall<?, ?> call) {
        return new GenerationStream(transport, new StreamState(call, timeouts.start(true)));
    }

    private GenerationStream subscription(StreamCall<SubscribeRequest, SubscribeResponse> call) {
        return new GenerationStream(
                transport, new SubscriptionState(call, timeouts.start(true), transport.retry()));
    }

    /** Fetches a page when the one before it is used up. */
    private final class Pages implements Iterator<RequestSummary> {
        private final RequestFilter filter;
        private Iterator<RequestSummary> rows;
        private String nextPage = "";

        Pages(RequestFilter filter) {
            this.filter = filter;
        }

        @Override
        public boolean hasNext() {
            while (rows == null || !rows.hasNext() && !nextPage.isEmpty()) {
                RequestPage page = transport.call(Calls.listRequests(filter, nextPage), timeouts);
                rows = page.requests().iterator();
                nextPage = page.nextPageToken();
            }
            return rows.hasNext();
        }

        @Override
        public RequestSummary next() {
            if (!hasNext()) {
                throw new NoSuchElementException();
            }
            return rows.next();
        }
    }
}
