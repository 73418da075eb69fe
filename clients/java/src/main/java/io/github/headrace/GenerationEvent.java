package io.github.headrace;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;

/**
 * What a stream yields. In order: accepted, started, any number of prompt log probabilities, deltas
 * and ends of outputs, then done as the last. {@link Resumed} and, in subscriptions, {@link
 * Reconnecting} may come at any place between.
 */
public sealed interface GenerationEvent {

    /**
     * At once: the request is valid and queued.
     *
     * @param requestId names the request in subscribe, cancel and logs
     * @param modelRevision name and content hash of the model that answers
     * @param promptTokens length of the prompt in tokens, template and special tokens included
     */
    record Accepted(String requestId, String modelRevision, int promptTokens) implements GenerationEvent {}

    /**
     * The engine computed a first step.
     *
     * @param cachedTokens how many of the prompt's tokens were found in the prefix cache
     */
    record Started(int cachedTokens) implements GenerationEvent {}

    /**
     * Log probabilities of a part of the prompt, where they were asked for. The parts come in order
     * and without gaps, before the first delta.
     *
     * @param firstTokenIndex position in the prompt of the first of these tokens; 1 in the first
     *     part, as nothing precedes token 0
     * @param logprobs one entry per token
     */
    record PromptLogprobs(int firstTokenIndex, Logprobs logprobs) implements GenerationEvent {}

    /**
     * New tokens of one output. Ids and text cover the same tokens; nothing is sent twice.
     *
     * @param outputIndex which of the n outputs, from 0
     * @param firstTokenIndex position of the first of these tokens in the output, from 0
     * @param tokenIds the new tokens
     * @param text their text of the answer; empty where they have none
     * @param logprobs of these tokens, where they were asked for
     * @param content where there is more than text, all of it in order; else empty
     */
    record Delta(
            int outputIndex,
            int firstTokenIndex,
            List<Integer> tokenIds,
            String text,
            Optional<Logprobs> logprobs,
            List<Content> content)
            implements GenerationEvent {

        /** Length of all contents: a character counts one, as do beginnings and ends of calls. */
        int length() {
            return content.isEmpty()
                    ? text.length()
                    : content.stream().mapToInt(Content::length).sum();
        }

        /** This delta without its first tokens, and without so much of its contents. */
        Delta without(int tokens, int length) {
            List<Content> rest = new ArrayList<>();
            StringBuilder answer = new StringBuilder(content.isEmpty() ? text.substring(length) : "");
            int left = length;
            for (Content piece : content) {
                int skipped = Math.min(left, piece.length());
                left -= skipped;
                if (skipped == 0 || skipped < piece.length()) {
                    Content kept = piece.without(skipped);
                    rest.add(kept);
                    answer.append(kept instanceof Content.AnswerText more ? more.text() : "");
                }
            }
            return new Delta(
                    outputIndex,
                    firstTokenIndex + tokens,
                    tokenIds.subList(tokens, tokenIds.size()),
                    answer.toString(),
                    logprobs.map(all -> all.from(tokens)),
                    List.copyOf(rest));
        }
    }

    /**
     * One output ended. The others go on.
     *
     * @param outputIndex which of the n outputs, from 0
     * @param reason why
     * @param matchedStop what matched, where a stop token or stop string did
     * @param error what went wrong, where the reason is {@link FinishReason#ERROR}
     * @param score what it was chosen by, where {@link GenerationOptions.Builder#bestOf} or
     *     {@link GenerationOptions.Builder#beamSearch} has outputs chosen
     */
    record OutputFinished(
            int outputIndex,
            FinishReason reason,
            Optional<MatchedStop> matchedStop,
            Optional<HeadraceException> error,
            Optional<Float> score)
            implements GenerationEvent {}

    /**
     * A worker of the server was replaced; the request goes on without a lost or repeated token.
     *
     * @param pause how long nothing was computed
     */
    record Resumed(Duration pause) implements GenerationEvent {}

    /**
     * The connection of a subscription broke, and this client opens it again. The event is not
     * on the wire. The tokens that follow continue exactly where the last one before it ended.
     *
     * @param error what broke
     * @param attempt which failure in a row this is, from 1
     * @param delay the pause before the next attempt
     */
    record Reconnecting(HeadraceException error, int attempt, Duration delay) implements GenerationEvent {}

    /**
     * All outputs ended. Nothing follows.
     *
     * @param usage tokens counted
     * @param ledger where the time went
     */
    record Done(Usage usage, Ledger ledger) implements GenerationEvent {}
}
