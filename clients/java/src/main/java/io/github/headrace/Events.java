package io.github.headrace;

import io.github.headrace.v1.Content;
import java.time.Duration;
import java.util.List;
import java.util.Optional;

/**
 * Converts events from the wire. Messages come in, records go out; what is collected from them is
 * not known here.
 */
final class Events {
    private Events() {}

    /** The event of a message; null for a kind that is newer than this client. */
    static GenerationEvent from(io.github.headrace.v1.GenerationEvent message) {
        return switch (message.getEventCase()) {
            case ACCEPTED -> accepted(message.getAccepted());
            case STARTED -> new GenerationEvent.Started(message.getStarted().getCachedTokens());
            case PROMPT_LOGPROBS -> promptLogprobs(message.getPromptLogprobs());
            case DELTA -> delta(message.getDelta());
            case OUTPUT_FINISHED -> finished(message.getOutputFinished());
            case RESUMED -> new GenerationEvent.Resumed(Duration.ofNanos(message.getResumed().getPauseNs()));
            case DONE -> done(message.getDone());
            case EVENT_NOT_SET -> null;
        };
    }

    static GenerationEvent.PromptLogprobs promptLogprobs(io.github.headrace.v1.PromptLogprobs part) {
        return new GenerationEvent.PromptLogprobs(part.getFirstTokenIndex(), Logprobs.from(part.getLogprobs()));
    }

    static GenerationEvent.OutputFinished finished(io.github.headrace.v1.OutputFinished finished) {
        return new GenerationEvent.OutputFinished(
                finished.getOutputIndex(),
                FinishReason.from(finished.getReason()),
                Optional.ofNullable(matched(finished.getMatchedStop())),
                finished.hasError() ? Optional.of(Failure.of(finished.getError(), null)) : Optional.empty(),
                finished.hasScore() ? Optional.of(finished.getScore()) : Optional.empty());
    }

    /** The text of a content list. */
    static String text(List<Content> content) {
        if (content.size() == 1) {
            return content.get(0).getText();
        }
        StringBuilder text = new StringBuilder();
        content.forEach(piece -> text.append(piece.getText()));
        return text.toString();
    }

    private static GenerationEvent accepted(io.github.headrace.v1.Accepted accepted) {
        return new GenerationEvent.Accepted(
                accepted.getRequestId(), accepted.getModelRevision(), accepted.getPromptTokens());
    }

    private static GenerationEvent delta(io.github.headrace.v1.Delta delta) {
        return new GenerationEvent.Delta(
                delta.getOutputIndex(),
                delta.getFirstTokenIndex(),
                delta.getTokenIdsList(),
                text(delta.getContentList()),
                delta.hasLogprobs() ? Optional.of(Logprobs.from(delta.getLogprobs())) : Optional.empty(),
                io.github.headrace.Content.from(delta.getContentList()));
    }

    private static GenerationEvent done(io.github.headrace.v1.Done done) {
        return new GenerationEvent.Done(Usage.from(done.getUsage()), Ledger.from(done.getLedger()));
    }

    private static MatchedStop matched(io.github.headrace.v1.MatchedStop stop) {
        return switch (stop.getKindCase()) {
            case TOKEN_ID -> new MatchedStop.Token(stop.getTokenId());
            case TEXT -> new MatchedStop.Text(stop.getText());
            case KIND_NOT_SET -> null;
        };
    }
}
