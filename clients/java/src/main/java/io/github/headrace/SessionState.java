package io.github.headrace;

import io.github.headrace.GenerationEvent.Delta;
import io.github.headrace.v1.SessionAttach;
import io.github.headrace.v1.SessionCancel;
import io.github.headrace.v1.SessionRequest;
import io.github.headrace.v1.SessionSubmit;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;

/**
 * What a session knows between two messages: which ids are open, where each output stands, and how
 * a step becomes typed events. Does not wait and does not read; {@link Session} holds a lock around
 * it.
 */
final class SessionState {

    /** Where the outputs of one open generation stand: the position of the next token by output. */
    private record Positions(int first, Map<Integer, Integer> next) {

        int of(int outputIndex) {
            return next.getOrDefault(outputIndex, first);
        }
    }

    /** One output of one generation. */
    private record Place(int streamId, int outputIndex) {}

    /** Tokens of one output within a step. */
    private static final class Run {
        final List<Integer> tokenIds = new ArrayList<>();
        final StringBuilder text = new StringBuilder();
    }

    private final Map<Integer, Positions> open = new HashMap<>();
    private int lastStreamId;

    /** The message that starts a generation, under an id of its own. */
    SessionRequest submit(SessionSubmit submission) {
        return SessionRequest.newBuilder()
                .setStreamId(newId(0))
                .setSubmit(submission)
                .build();
    }

    /** The message that reads a generation from a token on. */
    SessionRequest attach(SessionAttach attachment) {
        return SessionRequest.newBuilder()
                .setStreamId(newId(attachment.getFromToken()))
                .setAttach(attachment)
                .build();
    }

    /** The message that ends a generation; null where it has ended already. */
    SessionRequest cancel(int streamId) {
        return open.containsKey(streamId) ? cancelMessage(streamId, false) : null;
    }

    /**
     * The message that gives up reading a generation, whose events are dropped from here on; null
     * where it has ended already.
     */
    SessionRequest detach(int streamId) {
        return open.remove(streamId) == null ? null : cancelMessage(streamId, true);
    }

    boolean isOpen(int streamId) {
        return open.containsKey(streamId);
    }

    /** Notes an event that is handed out as it is. */
    void note(SessionEvent event) {
        if (event.isLast()) {
            open.remove(event.streamId());
        }
    }

    /**
     * A step as events: first the tokens, one delta per output that has some, then the rest; what
     * nobody reads any more is left out.
     */
    List<SessionEvent> events(SessionStep step) {
        List<SessionEvent> events = deltas(step);
        for (SessionEvent event : step.events()) {
            Positions positions = open.get(event.streamId());
            if (positions == null) {
                continue;
            }
            if (event.event() instanceof Delta delta) {
                positions.next.put(
                        delta.outputIndex(),
                        delta.firstTokenIndex() + delta.tokenIds().size());
            }
            events.add(event);
            note(event);
        }
        return events;
    }

    private List<SessionEvent> deltas(SessionStep step) {
        Map<Place, Run> runs = new LinkedHashMap<>();
        for (int row = 0; row < step.streamIds().size(); row++) {
            Place place = new Place(step.streamIds().get(row), step.outputIndices().get(row));
            Run run = runs.computeIfAbsent(place, unused -> new Run());
            run.tokenIds.add(step.tokenIds().get(row));
            run.text.append(step.texts().get(row));
        }
        List<SessionEvent> deltas = new ArrayList<>();
        runs.forEach((place, run) -> {
            Positions positions = open.get(place.streamId);
            if (positions != null) {
                deltas.add(new SessionEvent(place.streamId, delta(place, positions, run), null));
            }
        });
        return deltas;
    }

    private static Delta delta(Place place, Positions positions, Run run) {
        int first = positions.of(place.outputIndex);
        positions.next.put(place.outputIndex, first + run.tokenIds.size());
        return new Delta(
                place.outputIndex, first, List.copyOf(run.tokenIds), run.text.toString(), Optional.empty(), List.of());
    }

    private static SessionRequest cancelMessage(int streamId, boolean detach) {
        SessionCancel.Builder cancel = SessionCancel.newBuilder();
        if (detach) {
            cancel.setDetach(true);
        }
        return SessionRequest.newBuilder()
                .setStreamId(streamId)
                .setCancel(cancel)
                .build();
    }

    /** A stream id that was never used in this session. */
    private int newId(int firstToken) {
        if (lastStreamId == Integer.MAX_VALUE) {
            throw new IllegalStateException("the session has used all of its stream ids: open another one");
        }
        lastStreamId++;
        open.put(lastStreamId, new Positions(firstToken, new HashMap<>()));
        return lastStreamId;
    }
}
