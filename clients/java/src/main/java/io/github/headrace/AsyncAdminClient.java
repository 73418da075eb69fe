package io.github.headrace;

import java.time.Duration;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;

/**
 * What an operator does to a running server, as futures; see {@link AdminClient}.
 */
public final class AsyncAdminClient {
    private final Transport transport;
    private final Timeouts timeouts;

    AsyncAdminClient(Transport transport, Timeouts timeouts) {
        this.transport = transport;
        this.timeouts = timeouts;
    }

    /**
     * Starts a model of the server's repository folder. A model that serves already is left as it
     * is.
     *
     * @param model name of a folder of the model repository
     * @param memoryBytes memory of the device that it may take in all; 0: what the server's
     *     settings give
     * @return the model, when it serves
     */
    public CompletableFuture<LoadedModel> loadModel(String model, long memoryBytes) {
        return transport.callAsync(AdminCalls.loadModel(model, memoryBytes), timeouts);
    }

    /**
     * Takes a model away: no new generations, open ones go on for the grace time, then its memory
     * is free.
     *
     * @param model name of a served model
     * @param grace how long open generations may go on, at most 1 hour; null: the server's shutdown
     *     grace
     * @return completes when it is done
     */
    public CompletableFuture<Void> unloadModel(String model, Duration grace) {
        return transport.callAsync(AdminCalls.unloadModel(model, grace), timeouts);
    }

    /**
     * The models of the repository folder and those served, with their states.
     *
     * @return by name
     */
    public CompletableFuture<List<RepositoryModel>> listRepository() {
        return transport.callAsync(AdminCalls.listRepository(), timeouts);
    }

    /**
     * Takes no new generations on any model. What runs goes on.
     *
     * @return what runs and waits still
     */
    public CompletableFuture<DrainStatus> drain() {
        return transport.callAsync(AdminCalls.drain(false), timeouts);
    }

    /**
     * Takes new generations again.
     *
     * @return what runs and waits
     */
    public CompletableFuture<DrainStatus> resume() {
        return transport.callAsync(AdminCalls.drain(true), timeouts);
    }

    /**
     * Sets how much of each token is traced, for requests that do not say so themselves. Servers
     * without telemetry refuse it as FAILED_PRECONDITION.
     *
     * @param detail of requests from now on
     * @return completes when it is done
     */
    public CompletableFuture<Void> setTraceDetail(TraceDetail detail) {
        return transport.callAsync(AdminCalls.setTraceDetail(detail), timeouts);
    }

    /**
     * How a model's memory is divided.
     *
     * @param model name of the model; empty: the default model
     * @return empty while the model loads
     */
    public CompletableFuture<Optional<MemoryPlan>> memoryPlan(String model) {
        return transport.callAsync(AdminCalls.memoryPlan(model), timeouts);
    }
}
