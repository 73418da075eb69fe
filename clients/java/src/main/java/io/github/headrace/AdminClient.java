package io.github.headrace;

import java.time.Duration;
import java.util.List;
import java.util.Optional;

/**
 * What an operator does to a running server. The caller's key needs the permission for it, and
 * every call leaves a line in the server's audit log. Loading and unloading have no timeout but
 * that of {@link HeadraceClient#withTimeout}.
 */
public final class AdminClient {
    private final Transport transport;
    private final Timeouts timeouts;

    AdminClient(Transport transport, Timeouts timeouts) {
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
    public LoadedModel loadModel(String model, long memoryBytes) {
        return transport.call(AdminCalls.loadModel(model, memoryBytes), timeouts);
    }

    /**
     * Takes a model away: no new generations, open ones go on for the grace time, then its memory
     * is free.
     *
     * @param model name of a served model
     * @param grace how long open generations may go on, at most 1 hour; null: the server's shutdown
     *     grace
     */
    public void unloadModel(String model, Duration grace) {
        transport.call(AdminCalls.unloadModel(model, grace), timeouts);
    }

    /**
     * The models of the repository folder and those served, with their states.
     *
     * @return by name
     */
    public List<RepositoryModel> listRepository() {
        return transport.call(AdminCalls.listRepository(), timeouts);
    }

    /**
     * Takes no new generations on any model. What runs goes on.
     *
     * @return what runs and waits still
     */
    public DrainStatus drain() {
        return transport.call(AdminCalls.drain(false), timeouts);
    }

    /**
     * Takes new generations again.
     *
     * @return what runs and waits
     */
    public DrainStatus resume() {
        return transport.call(AdminCalls.drain(true), timeouts);
    }

    /**
     * Sets how much of each token is traced, for requests that do not say so themselves. Servers
     * without telemetry refuse it as FAILED_PRECONDITION.
     *
     * @param detail of requests from now on
     */
    public void setTraceDetail(TraceDetail detail) {
        transport.call(AdminCalls.setTraceDetail(detail), timeouts);
    }

    /**
     * How a model's memory is divided.
     *
     * @param model name of the model; empty: the default model
     * @return empty while the model loads
     */
    public Optional<MemoryPlan> memoryPlan(String model) {
        return transport.call(AdminCalls.memoryPlan(model), timeouts);
    }
}
