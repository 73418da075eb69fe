package io.github.headrace;

import io.github.headrace.GenerationEvent.Delta;
import io.github.headrace.GenerationEvent.Done;
import io.github.headrace.GenerationEvent.OutputFinished;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Optional;

/**
 * The events of one generation, to be read once and by one thread: one by one (it is its own
 * iterator), as text, or as the whole answer.
 *
 * <p>Reading throws {@link HeadraceException} where the call or the generation failed.
 */
public abstract sealed class EventReader implements Iterator<GenerationEvent>, Iterable<GenerationEvent>
        permits GenerationStream, SessionGeneration {
    private final Transcript transcript = new Transcript();
    private GenerationEvent ahead;

    EventReader() {}

    /** Waits for the next event; null at the end. */
    abstract GenerationEvent read();

    /**
     * The request's name.
     *
     * @return empty before the accepted event was read
     */
    public Optional<String> requestId() {
        return transcript.requestId();
    }

    /**
     * Tokens counted.
     *
     * @return empty before the end was read
     */
    public Optional<Usage> usage() {
        return transcript.done().map(Done::usage);
    }

    /**
     * Where the time went.
     *
     * @return empty before the end was read
     */
    public Optional<Ledger> ledger() {
        return transcript.done().map(Done::ledger);
    }

    /**
     * Waits for the next event.
     *
     * @return whether there is one
     * @throws HeadraceException the call failed, or the generation cannot go on
     */
    @Override
    public boolean hasNext() {
        if (ahead == null) {
            ahead = read();
        }
        return ahead != null;
    }

    @Override
    public GenerationEvent next() {
        if (!hasNext()) {
            throw new NoSuchElementException();
        }
        GenerationEvent event = ahead;
        ahead = null;
        transcript.add(event);
        return event;
    }

    @Override
    public Iterator<GenerationEvent> iterator() {
        return this;
    }

    /**
     * The pieces of text of a single output, as they arrive. While they are read they throw an
     * {@link IllegalStateException} where the stream carries more than one output, and a {@link
     * HeadraceException} where the output ended with an error.
     *
     * @return to be read once
     */
    public Iterable<String> text() {
        return TextIterator::new;
    }

    /**
     * Reads to the end.
     *
     * @return the whole answer, with the events that were read before
     * @throws HeadraceException the call failed, or an output ended with an error
     */
    public Completion result() {
        while (hasNext()) {
            next();
        }
        return transcript.completion();
    }

    /** The text that an event adds; empty where it adds none. */
    private String piece(GenerationEvent event) {
        if (transcript.outputCount() > 1) {
            throw new IllegalStateException(
                    "text() reads one output, but this stream carries several: read its events, or use result()");
        }
        if (event instanceof OutputFinished finished) {
            Transcript.checkNoError(finished, requestId().orElse(null));
        }
        return event instanceof Delta delta ? delta.text() : "";
    }

    private final class TextIterator implements Iterator<String> {
        private String piece = "";

        @Override
        public boolean hasNext() {
            while (piece.isEmpty() && EventReader.this.hasNext()) {
                piece = piece(EventReader.this.next());
            }
            return !piece.isEmpty();
        }

        @Override
        public String next() {
            if (!hasNext()) {
                throw new NoSuchElementException();
            }
            String text = piece;
            piece = "";
            return text;
        }
    }
}
