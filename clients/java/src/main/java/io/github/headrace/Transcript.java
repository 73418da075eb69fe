package io.github.headrace;

import io.github.headrace.GenerationEvent.Accepted;
import io.github.headrace.GenerationEvent.Delta;
import io.github.headrace.GenerationEvent.Done;
import io.github.headrace.GenerationEvent.OutputFinished;
import io.github.headrace.GenerationEvent.PromptLogprobs;
import io.github.headrace.v1.CompleteResponse;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;

/**
 * Collects whole answers: events go in one by one (or a Complete response as a whole), a {@link
 * Completion} comes out.
 */
final class Transcript {
    private static final String CUT_SHORT = "the stream ended before the generation did";

    /** What there is of one output so far. */
    private static final class Part {
        final StringBuilder text = new StringBuilder();
        final List<Integer> tokenIds = new ArrayList<>();
        final List<Logprobs> logprobs = new ArrayList<>();
        final StringBuilder reasoning = new StringBuilder();
        final Map<Integer, ToolCall> calls = new TreeMap<>();
        OutputFinished finished;

        void add(Content content) {
            if (content instanceof Content.ReasoningText more) {
                reasoning.append(more.text());
            } else if (content instanceof Content.ToolCallStarted call) {
                calls.put(call.index(), new ToolCall(call.id(), call.name(), "", false));
            } else if (content instanceof Content.ToolCallFinished call) {
                // Of a call whose beginning was not read, id and name are empty.
                ToolCall begun = calls.getOrDefault(call.index(), new ToolCall("", "", "", false));
                calls.put(
                        call.index(), new ToolCall(begun.id(), begun.name(), call.arguments(), call.valid()));
            }
        }
    }

    private final Map<Integer, Part> parts = new TreeMap<>();
    private final List<Logprobs> promptLogprobs = new ArrayList<>();
    private Accepted accepted;
    private Done done;

    void add(GenerationEvent event) {
        if (event instanceof Delta delta) {
            Part part = part(delta.outputIndex());
            part.text.append(delta.text());
            part.tokenIds.addAll(delta.tokenIds());
            delta.content().forEach(part::add);
            delta.logprobs().ifPresent(part.logprobs::add);
        } else if (event instanceof OutputFinished finished) {
            part(finished.outputIndex()).finished = finished;
        } else if (event instanceof PromptLogprobs run) {
            promptLogprobs.add(run.logprobs());
        } else if (event instanceof Accepted first) {
            accepted = first;
        } else if (event instanceof Done last) {
            done = last;
        }
    }

    Optional<String> requestId() {
        return Optional.ofNullable(accepted).map(Accepted::requestId);
    }

    Optional<Done> done() {
        return Optional.ofNullable(done);
    }

    int outputCount() {
        return parts.size();
    }

    /**
     * The whole answer, once done.
     *
     * @throws HeadraceException an output ended with an error; an incomplete answer is never
     *     returned as if it were whole
     */
    Completion completion() {
        if (accepted == null || done == null || parts.isEmpty()) {
            throw Failure.contract(CUT_SHORT, requestId().orElse(null));
        }
        List<Output> outputs = new ArrayList<>();
        parts.forEach((index, part) -> outputs.add(output(index, part)));
        return new Completion(
                accepted.requestId(),
                accepted.modelRevision(),
                List.copyOf(outputs),
                done.usage(),
                done.ledger(),
                Optional.ofNullable(Logprobs.joined(promptLogprobs)));
    }

    static Completion completion(CompleteResponse response) {
        if (response.getOutputsCount() == 0) {
            throw Failure.contract("the answer holds no output", response.getRequestId());
        }
        return new Completion(
                response.getRequestId(),
                response.getModelRevision(),
                response.getOutputsList().stream()
                        .map(output -> output(output, response.getRequestId()))
                        .toList(),
                Usage.from(response.getUsage()),
                Ledger.from(response.getLedger()),
                Optional.ofNullable(Logprobs.joined(response.getPromptLogprobsList().stream()
                        .map(run -> Logprobs.from(run.getLogprobs()))
                        .toList())));
    }

    private Part part(int index) {
        return parts.computeIfAbsent(index, unused -> new Part());
    }

    private Output output(int index, Part part) {
        String id = accepted.requestId();
        if (part.finished == null) {
            throw Failure.contract("the generation is done, but an output never finished", id);
        }
        checkNoError(part.finished, id);
        return new Output(
                index,
                part.text.toString(),
                List.copyOf(part.tokenIds),
                part.finished.reason(),
                part.finished.matchedStop(),
                Optional.ofNullable(Logprobs.joined(part.logprobs)),
                part.finished.score(),
                part.reasoning.toString(),
                List.copyOf(part.calls.values()));
    }

    private static Output output(io.github.headrace.v1.Output output, String requestId) {
        OutputFinished finished = Events.finished(output.getFinished());
        checkNoError(finished, requestId);
        boolean reported = output.getLogprobs().getSampledCount() > 0;
        return new Output(
                output.getOutputIndex(),
                Events.text(output.getContentList()),
                output.getTokenIdsList(),
                finished.reason(),
                finished.matchedStop(),
                reported ? Optional.of(Logprobs.from(output.getLogprobs())) : Optional.empty(),
                finished.score(),
                "",
                List.of());
    }

    /** Throws what an output ended with, where that was an error. */
    static void checkNoError(OutputFinished finished, String requestId) {
        if (finished.reason() == FinishReason.ERROR) {
            throw finished.error()
                    .orElseGet(() -> Failure.contract("the engine could not go on with this output", requestId));
        }
    }
}
