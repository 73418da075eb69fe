// What a stream yields: plain structs that mirror headrace.v1.GenerationEvent, and the conversion
// from the wire. Does not collect them (completion.go) and reads no connection (stream.go).

package headrace

import (
	"strings"
	"time"

	"github.com/headrace/headrace/clients/go/headracev1"
)

// Event is one event of a stream: [Accepted], [Started], [PromptLogprobs], [Delta],
// [OutputFinished], [Resumed], [Reconnecting], [Done], and in sessions [Failed]. They come in this
// order, deltas and finished outputs any number of times.
type Event interface{ event() }

// Accepted: the request is valid and queued.
type Accepted struct {
	// RequestID names the request in Subscribe, Cancel and the server's logs.
	RequestID string
	// ModelRevision is the name and content hash of the model that answers.
	ModelRevision string
	// PromptTokens is the length of the prompt, template and special tokens included.
	PromptTokens uint32
}

// Started: the engine computed a first step.
type Started struct {
	// CachedTokens of the prompt came from the prefix cache.
	CachedTokens uint32
}

// Delta is new tokens of one output. TokenIDs and Text cover the same tokens; nothing is sent
// twice. Text is the answer's; where there is more than that, Content has all of it in order, and
// is nil otherwise.
type Delta struct {
	OutputIndex uint32
	// FirstTokenIndex is the position in the output of the first of these tokens.
	FirstTokenIndex uint32
	TokenIDs        []uint32
	Text            string
	// Logprobs is nil unless [WithLogprobs] asked for them.
	Logprobs *Logprobs
	Content  []Content
}

// NextTokenIndex is the position of the token that follows these: what [WithFromToken] takes to go
// on here.
func (d Delta) NextTokenIndex() uint32 { return d.FirstTokenIndex + uint32(len(d.TokenIDs)) }

// OutputFinished: one output ended. The others go on.
type OutputFinished struct {
	OutputIndex uint32
	Reason      FinishReason
	// Matched is what ended the output, for [FinishStop].
	Matched MatchedStop
	// Err is what went wrong, for [FinishError].
	Err *Error
	// Score is what the output was chosen by; nil unless [WithBestOf] or [WithBeamSearch] has outputs
	// chosen.
	Score *float32
}

// MatchedStop is what ended an output: a stop string, or else a token where IsToken is set. The
// zero value is neither.
type MatchedStop struct {
	Text    string
	TokenID uint32
	IsToken bool
}

// Resumed: a worker of the server was replaced; the request goes on without a lost or repeated
// token.
type Resumed struct {
	// Pause is how long nothing was computed.
	Pause time.Duration
}

// Reconnecting: the connection of a subscription broke, and this client opens it again after Delay.
// It is not on the wire. The tokens that follow continue exactly where the last one before it
// ended.
type Reconnecting struct {
	Err     *Error
	Attempt int
	Delay   time.Duration
}

// Done: all outputs ended. Nothing follows.
type Done struct {
	Usage  Usage
	Ledger Ledger
}

// Failed: a generation of a session cannot start or go on. Nothing follows for it; the session and
// its other generations go on.
type Failed struct {
	Err *Error
}

func (Accepted) event()       {}
func (Started) event()        {}
func (PromptLogprobs) event() {}
func (Delta) event()          {}
func (OutputFinished) event() {}
func (Resumed) event()        {}
func (Reconnecting) event()   {}
func (Done) event()           {}
func (Failed) event()         {}

// FinishReason is why an output ended.
type FinishReason string

// The reasons. A reason that is newer than this client is FinishUnspecified.
const (
	FinishUnspecified FinishReason = "unspecified"
	FinishStop        FinishReason = "stop"
	FinishLength      FinishReason = "length"
	FinishCancelled   FinishReason = "cancelled"
	FinishDeadline    FinishReason = "deadline"
	FinishError       FinishReason = "error"
	// FinishToolCalls is as FinishStop, of an output that called at least one function.
	FinishToolCalls FinishReason = "tool_calls"
)

var finishReasons = map[headracev1.FinishReason]FinishReason{
	headracev1.FinishReason_FINISH_REASON_STOP:       FinishStop,
	headracev1.FinishReason_FINISH_REASON_LENGTH:     FinishLength,
	headracev1.FinishReason_FINISH_REASON_CANCELLED:  FinishCancelled,
	headracev1.FinishReason_FINISH_REASON_DEADLINE:   FinishDeadline,
	headracev1.FinishReason_FINISH_REASON_ERROR:      FinishError,
	headracev1.FinishReason_FINISH_REASON_TOOL_CALLS: FinishToolCalls,
}

// Usage is tokens counted.
type Usage struct {
	// PromptTokens are counted once, however many outputs there are.
	PromptTokens uint32
	// OutputTokens of all outputs, end-of-text tokens included.
	OutputTokens uint32
	// CachedTokens of the prompt were found in the prefix cache.
	CachedTokens uint32
	// ReasoningTokens are output tokens that were reasoning.
	ReasoningTokens uint32
}

// Ledger is where the time of a request went; Queued to BlockedOnReader do not overlap and add up
// to EndToEnd within 1 ms.
type Ledger struct {
	Queued, Prefill, Decode, Preempted, EngineRestart, DetokenizeAndSend, BlockedOnReader time.Duration

	EndToEnd time.Duration
	// TTFT is from the arrival of the call to the first token in the engine.
	TTFT time.Duration
	// StepCount is the steps that computed a token of the request. DraftTokens were drafted and
	// verified by them; each of AcceptedTokens was right, and saved its output a step.
	StepCount, Preemptions, CachedTokens, DraftTokens, AcceptedTokens uint32
}

// eventFromProto is the event of a message; nil for a kind that is newer than this client.
func eventFromProto(message *headracev1.GenerationEvent) Event {
	switch kind := message.GetEvent().(type) {
	case *headracev1.GenerationEvent_Accepted:
		a := kind.Accepted
		return Accepted{a.GetRequestId(), a.GetModelRevision(), a.GetPromptTokens()}
	case *headracev1.GenerationEvent_Started:
		return Started{kind.Started.GetCachedTokens()}
	case *headracev1.GenerationEvent_PromptLogprobs:
		return promptLogprobsFromProto(kind.PromptLogprobs)
	case *headracev1.GenerationEvent_Delta:
		return deltaFromProto(kind.Delta)
	case *headracev1.GenerationEvent_OutputFinished:
		return finishedFromProto(kind.OutputFinished)
	case *headracev1.GenerationEvent_Resumed:
		return Resumed{nanoseconds(kind.Resumed.GetPauseNs())}
	case *headracev1.GenerationEvent_Done:
		return Done{usageFromProto(kind.Done.GetUsage()), ledgerFromProto(kind.Done.GetLedger())}
	default:
		return nil
	}
}

func deltaFromProto(d *headracev1.Delta) Delta {
	return Delta{
		OutputIndex:     d.GetOutputIndex(),
		FirstTokenIndex: d.GetFirstTokenIndex(),
		TokenIDs:        d.GetTokenIds(),
		Text:            textOf(d.GetContent()),
		Logprobs:        logprobsFromProto(d.GetLogprobs()),
		Content:         contentFromProto(d.GetContent()),
	}
}

func finishedFromProto(f *headracev1.OutputFinished) OutputFinished {
	made := OutputFinished{OutputIndex: f.GetOutputIndex(), Reason: FinishUnspecified}
	if f != nil {
		made.Score = f.Score
	}
	if reason, known := finishReasons[f.GetReason()]; known {
		made.Reason = reason
	}
	switch kind := f.GetMatchedStop().GetKind().(type) {
	case *headracev1.MatchedStop_TokenId:
		made.Matched = MatchedStop{TokenID: kind.TokenId, IsToken: true}
	case *headracev1.MatchedStop_Text:
		made.Matched = MatchedStop{Text: kind.Text}
	}
	if f.GetError() != nil {
		made.Err = fromStatus(f.GetError(), "")
	}
	return made
}

func usageFromProto(u *headracev1.Usage) Usage {
	return Usage{u.GetPromptTokens(), u.GetOutputTokens(), u.GetCachedTokens(), u.GetReasoningTokens()}
}

func ledgerFromProto(l *headracev1.Ledger) Ledger {
	return Ledger{
		Queued:            nanoseconds(l.GetQueuedNs()),
		Prefill:           nanoseconds(l.GetPrefillNs()),
		Decode:            nanoseconds(l.GetDecodeNs()),
		Preempted:         nanoseconds(l.GetPreemptedNs()),
		EngineRestart:     nanoseconds(l.GetEngineRestartNs()),
		DetokenizeAndSend: nanoseconds(l.GetDetokenizeAndSendNs()),
		BlockedOnReader:   nanoseconds(l.GetBlockedOnReaderNs()),
		EndToEnd:          nanoseconds(l.GetEndToEndNs()),
		TTFT:              nanoseconds(l.GetTtftNs()),
		StepCount:         l.GetStepCount(),
		Preemptions:       l.GetPreemptions(),
		CachedTokens:      l.GetCachedTokens(),
		DraftTokens:       l.GetDraftTokens(),
		AcceptedTokens:    l.GetAcceptedTokens(),
	}
}

func textOf(content []*headracev1.Content) string {
	if len(content) == 1 {
		return content[0].GetText()
	}
	var text strings.Builder
	for _, piece := range content {
		text.WriteString(piece.GetText())
	}
	return text.String()
}

func nanoseconds(ns uint64) time.Duration { return time.Duration(ns) }
