package io.github.headrace;

/**
 * One event of one generation of a session. Exactly one of {@code event} and {@code error} is not
 * null.
 *
 * @param streamId which generation, see {@link SessionGeneration#streamId}
 * @param event what happened; null where the generation failed
 * @param error why the generation cannot start or go on, nothing follows for its id; else null
 */
public record SessionEvent(int streamId, GenerationEvent event, HeadraceException error) {

    /** Whether nothing follows for the generation. */
    boolean isLast() {
        return error != null || event instanceof GenerationEvent.Done;
    }
}
