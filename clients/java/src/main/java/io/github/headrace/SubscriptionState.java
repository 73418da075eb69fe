package io.github.headrace;

import io.github.headrace.GenerationEvent.Accepted;
import io.github.headrace.GenerationEvent.Delta;
import io.github.headrace.GenerationEvent.OutputFinished;
import io.github.headrace.GenerationEvent.PromptLogprobs;
import io.github.headrace.GenerationEvent.Reconnecting;
import io.github.headrace.GenerationEvent.Started;
import io.github.headrace.v1.SubscribeRequest;
import io.github.headrace.v1.SubscribeResponse;
import io.grpc.Deadline;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;

/**
 * State of a Subscribe stream, which continues after a broken connection without a lost or doubled
 * token.
 *
 * <ul>
 * <li>One output: it is asked for again from the token after the last one yielded.
 * <li>All outputs: they stand at different tokens, and how many there are only the server knows. So
 * they are asked for again from where the subscription began, and what was yielded already is
 * dropped by counting tokens and the length of contents. Contents and tokens of a delta cover each
 * other, and contents are the same however the deltas are cut, so both counts name the same place.
 * </ul>
 */
final class SubscriptionState extends StreamState {

    /** Where one output stands. */
    private final class Place {
        boolean begun;
        int nextToken = first.getFromToken();
        // Of the contents, as Delta counts it.
        int length;
        boolean finished;
        // What the server sends again: tokens before replayedTokens, and this much of contents.
        int replayedTokens;
        int replayedLength;
    }

    private final StreamCall<SubscribeRequest, SubscribeResponse> firstCall;
    private final SubscribeRequest first;
    private final RetryPolicy retry;
    private final Map<Integer, Place> places = new TreeMap<>();
    private int nextPromptToken;
    private int failures;
    private boolean started;

    SubscriptionState(
            StreamCall<SubscribeRequest, SubscribeResponse> call, Deadline deadline, RetryPolicy retry) {
        super(call, deadline);
        this.firstCall = call;
        this.first = call.request();
        this.retry = retry;
    }

    /**
     * Prepares the call that continues the stream. Final are all failures but UNAVAILABLE, and too
     * many in a row.
     */
    @Override
    Reconnecting failed(HeadraceException error) {
        failures++;
        if (!(error instanceof UnavailableException) || failures >= retry.maxAttempts()) {
            throw error;
        }
        Duration delay = pause(error);
        if (deadline() != null && deadline().timeRemaining(TimeUnit.NANOSECONDS) <= delay.toNanos()) {
            throw error;
        }
        callNext(firstCall.with(continuation()));
        return new Reconnecting(error, failures, delay);
    }

    @Override
    GenerationEvent newPart(GenerationEvent event) {
        failures = 0;
        if (event instanceof Delta delta) {
            return newTokens(delta);
        }
        if (event instanceof PromptLogprobs part) {
            return newPromptTokens(part);
        }
        return isKnown(event) ? null : event;
    }

    private Duration pause(HeadraceException error) {
        double spread = ThreadLocalRandom.current().nextDouble(0.8, 1.2);
        Duration own = Duration.ofNanos((long) (retry.backoff(failures).toNanos() * spread));
        Duration asked = error.retryAfter().orElse(Duration.ZERO);
        return own.compareTo(asked) < 0 ? asked : own;
    }

    private SubscribeRequest continuation() {
        if (first.hasOutputIndex()) {
            int next = place(first.getOutputIndex()).nextToken;
            return first.toBuilder().setFromToken(next).build();
        }
        for (Place place : places.values()) {
            place.replayedTokens = place.nextToken;
            place.replayedLength = place.length;
        }
        return first;
    }

    private Place place(int outputIndex) {
        return places.computeIfAbsent(outputIndex, unused -> new Place());
    }

    /** Whether an event is one that a continuation repeats. */
    private boolean isKnown(GenerationEvent event) {
        boolean known = false;
        if (event instanceof Accepted) {
            known = requestId() != null;
        } else if (event instanceof Started) {
            known = started;
            started = true;
        } else if (event instanceof OutputFinished finished) {
            Place place = place(finished.outputIndex());
            known = place.finished;
            place.finished = true;
        }
        return known;
    }

    /** A continuation repeats all of the prompt, perhaps cut differently. */
    private PromptLogprobs newPromptTokens(PromptLogprobs part) {
        int end = part.firstTokenIndex() + part.logprobs().sampled().size();
        int known = Math.max(0, nextPromptToken - part.firstTokenIndex());
        if (end <= nextPromptToken) {
            return null;
        }
        nextPromptToken = end;
        return new PromptLogprobs(part.firstTokenIndex() + known, part.logprobs().from(known));
    }

    private Delta newTokens(Delta whole) {
        Place place = place(whole.outputIndex());
        Delta delta = withoutReplay(whole, place);
        if (delta.tokenIds().isEmpty() && delta.length() == 0) {
            return null;
        }
        // The first delta may start before fromToken, where a character is spread over tokens on
        // both sides of it.
        boolean early = delta.firstTokenIndex() < place.nextToken && place.begun;
        if (delta.firstTokenIndex() > place.nextToken || early) {
            throw Failure.contract(
                    "output %d continues at token %d, expected %d"
                            .formatted(delta.outputIndex(), delta.firstTokenIndex(), place.nextToken),
                    requestId());
        }
        place.begun = true;
        place.nextToken = delta.firstTokenIndex() + delta.tokenIds().size();
        place.length += delta.length();
        return delta;
    }

    private static Delta withoutReplay(Delta delta, Place place) {
        List<Integer> ids = delta.tokenIds();
        int knownTokens = Math.min(Math.max(0, place.replayedTokens - delta.firstTokenIndex()), ids.size());
        int knownLength = Math.min(place.replayedLength, delta.length());
        if (knownTokens == 0 && knownLength == 0) {
            return delta;
        }
        place.replayedLength -= knownLength;
        return delta.without(knownTokens, knownLength);
    }
}
