package io.github.headrace;

import java.util.Objects;
import java.util.concurrent.Flow;
import java.util.function.Supplier;

/** Opens a new stream for each subscriber. */
record EventPublisher(Transport transport, Supplier<StreamState> state) implements Flow.Publisher<GenerationEvent> {

    @Override
    public void subscribe(Flow.Subscriber<? super GenerationEvent> subscriber) {
        Objects.requireNonNull(subscriber, "subscriber");
        new EventSubscription(transport, state.get(), subscriber).start();
    }
}
