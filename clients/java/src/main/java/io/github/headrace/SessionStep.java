package io.github.headrace;

import io.github.headrace.v1.SessionResponse;
import io.github.headrace.v1.SessionTokens;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;

/**
 * What is new in all generations of a session since the step before.
 *
 * <p>The first four are columns of equal length: entry i of each belongs to the same token, in
 * order within an output. Tokens with log probabilities, and the first ones of a generation
 * attached past its beginning, come as {@link GenerationEvent.Delta} events instead. A generation's
 * events come after its tokens.
 *
 * @param streamIds which generation
 * @param outputIndices which of its n outputs
 * @param tokenIds the token
 * @param texts its text; empty where it has none of its own
 * @param events everything that is no token in the columns
 */
public record SessionStep(
        List<Integer> streamIds,
        List<Integer> outputIndices,
        List<Integer> tokenIds,
        List<String> texts,
        List<SessionEvent> events) {

    /**
     * The step of a message; columns that the wire leaves out because they say nothing are filled
     * up.
     */
    static SessionStep from(SessionResponse response) {
        SessionTokens tokens = response.getTokens();
        int count = tokens.getStreamIdsCount();
        return new SessionStep(
                tokens.getStreamIdsList(),
                filled(tokens.getOutputIndicesList(), count, 0),
                tokens.getTokenIdsList(),
                filled(tokens.getTextsList(), count, ""),
                events(response));
    }

    private static <T> List<T> filled(List<T> column, int count, T value) {
        return column.isEmpty() ? Collections.nCopies(count, value) : column;
    }

    /** The typed events; kinds newer than this client are left out. */
    private static List<SessionEvent> events(SessionResponse response) {
        List<SessionEvent> events = new ArrayList<>();
        for (io.github.headrace.v1.SessionEvent message : response.getEventsList()) {
            if (message.hasError()) {
                events.add(new SessionEvent(message.getStreamId(), null, Failure.of(message.getError(), null)));
                continue;
            }
            GenerationEvent event = Events.from(message.getEvent());
            if (event != null) {
                events.add(new SessionEvent(message.getStreamId(), event, null));
            }
        }
        return List.copyOf(events);
    }
}
