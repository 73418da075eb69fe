// Whole answers: collected from a stream's events, or taken from a Complete response. The
// transcript that every stream keeps of what it has yielded is here too; its positions are what a
// broken subscription continues from.

package headrace

import (
	"cmp"
	"slices"
	"strings"

	"github.com/headrace/headrace/clients/go/headracev1"
)

// Output is one of the n outputs, whole.
type Output struct {
	OutputIndex  uint32
	Text         string
	TokenIDs     []uint32
	FinishReason FinishReason
	Matched      MatchedStop
	// Logprobs is nil unless [WithLogprobs] asked for them.
	Logprobs *Logprobs
	// Score is what the output was chosen by; nil unless [WithBestOf] or [WithBeamSearch] has outputs
	// chosen.
	Score *float32
	// Reasoning is what the model wrote for itself.
	Reasoning string
	// ToolCalls are the functions that it called.
	ToolCalls []ToolCall
}

// Message is the output as the assistant's message of a conversation that goes on.
func (o Output) Message() Message {
	return Message{Role: headracev1.Role_ROLE_ASSISTANT, Text: o.Text, ToolCalls: o.ToolCalls, Reasoning: o.Reasoning}
}

// Completion is a whole answer. Its methods speak of the first output, which is the only one unless
// [WithOutputs] asked for more.
type Completion struct {
	RequestID     string
	ModelRevision string
	// Outputs by index; at least one.
	Outputs []Output
	Usage   Usage
	Ledger  Ledger
	// PromptLogprobs are of the whole prompt from its second token on; nil unless
	// [WithPromptLogprobs] asked for them.
	PromptLogprobs *PromptLogprobs
}

// Text of the first output.
func (c *Completion) Text() string { return c.Outputs[0].Text }

// ToolCalls of the first output.
func (c *Completion) ToolCalls() []ToolCall { return c.Outputs[0].ToolCalls }

// Message is the first output as a message of a conversation that goes on.
func (c *Completion) Message() Message { return c.Outputs[0].Message() }

// TokenIDs of the first output.
func (c *Completion) TokenIDs() []uint32 { return c.Outputs[0].TokenIDs }

// FinishReason of the first output.
func (c *Completion) FinishReason() FinishReason { return c.Outputs[0].FinishReason }

// transcript is what a stream has yielded so far, by output.
type transcript struct {
	requestID string
	accepted  *Accepted
	outputs   map[uint32]*outputTranscript
	prompt    *PromptLogprobs
	done      *Done
}

// outputTranscript is what has been yielded of one output so far.
type outputTranscript struct {
	begun      bool
	firstToken uint32
	tokenIDs   []uint32
	text       strings.Builder
	content    collected
	length     int // of all contents, as Delta.length counts it
	logprobs   *Logprobs
	finished   *OutputFinished
	// The last place where no character can have been left open: the position of its token, and the
	// length of the contents before it.
	sureToken  uint32
	sureLength int
}

// nextToken is the position in the output of the token that follows.
func (o *outputTranscript) nextToken() uint32 { return o.firstToken + uint32(len(o.tokenIDs)) }

// output makes the transcript of an output when it is first heard of.
func (t *transcript) output(index uint32) *outputTranscript {
	if t.outputs == nil {
		t.outputs = make(map[uint32]*outputTranscript)
	}
	if t.outputs[index] == nil {
		t.outputs[index] = &outputTranscript{}
	}
	return t.outputs[index]
}

// add takes the next event.
func (t *transcript) add(event Event) {
	switch event := event.(type) {
	case Accepted:
		t.accepted, t.requestID = &event, event.RequestID
	case PromptLogprobs:
		t.addPrompt(event)
	case Delta:
		t.output(event.OutputIndex).add(event)
	case OutputFinished:
		t.output(event.OutputIndex).finished = &event
	case Done:
		t.done = &event
	}
}

func (t *transcript) addPrompt(part PromptLogprobs) {
	if t.prompt == nil {
		t.prompt = &PromptLogprobs{FirstTokenIndex: part.FirstTokenIndex}
	}
	t.prompt.Logprobs.add(&part.Logprobs)
}

func (o *outputTranscript) add(delta Delta) {
	if !o.begun {
		o.begun, o.firstToken, o.sureToken = true, delta.FirstTokenIndex, delta.FirstTokenIndex
	}
	o.tokenIDs = append(o.tokenIDs, delta.TokenIDs...)
	o.text.WriteString(delta.Text)
	o.content.add(delta.Content)
	o.length += delta.length()
	// After a replacement character nobody can tell from the text whether the bytes behind it might
	// have become a character yet.
	wasSure := o.sureLength+delta.length() == o.length || delta.Content != nil
	if !strings.HasSuffix(delta.Text, "\uFFFD") && (delta.Text != "" || wasSure) {
		o.sureToken, o.sureLength = o.nextToken(), o.length
	}
	if delta.Logprobs != nil {
		if o.logprobs == nil {
			o.logprobs = &Logprobs{}
		}
		o.logprobs.add(delta.Logprobs)
	}
}

// completion is the whole answer, once done. An incomplete one is never returned as if it were
// whole.
func (t *transcript) completion() (*Completion, error) {
	if t.accepted == nil || t.done == nil || len(t.outputs) == 0 {
		return nil, broken(t.requestID, "the stream ended before the generation did")
	}
	made := &Completion{
		RequestID:      t.requestID,
		ModelRevision:  t.accepted.ModelRevision,
		Usage:          t.done.Usage,
		Ledger:         t.done.Ledger,
		PromptLogprobs: t.prompt,
	}
	for index, o := range t.outputs {
		if err := checkFinished(o.finished, t.requestID); err != nil {
			return nil, err
		}
		made.Outputs = append(made.Outputs, Output{
			OutputIndex:  index,
			Text:         o.text.String(),
			TokenIDs:     o.tokenIDs,
			FinishReason: o.finished.Reason,
			Matched:      o.finished.Matched,
			Logprobs:     o.logprobs,
			Score:        o.finished.Score,
			Reasoning:    o.content.reasoning.String(),
			ToolCalls:    o.content.calls,
		})
	}
	slices.SortFunc(made.Outputs, func(a, b Output) int { return cmp.Compare(a.OutputIndex, b.OutputIndex) })
	return made, nil
}

// completionFromProto is the answer of a Complete call.
func completionFromProto(response *headracev1.CompleteResponse) (*Completion, error) {
	if len(response.GetOutputs()) == 0 {
		return nil, broken(response.GetRequestId(), "the answer holds no output")
	}
	made := &Completion{
		RequestID:     response.GetRequestId(),
		ModelRevision: response.GetModelRevision(),
		Usage:         usageFromProto(response.GetUsage()),
		Ledger:        ledgerFromProto(response.GetLedger()),
	}
	for _, o := range response.GetOutputs() {
		finished := finishedFromProto(o.GetFinished())
		if err := checkFinished(&finished, response.GetRequestId()); err != nil {
			return nil, err
		}
		made.Outputs = append(made.Outputs, Output{
			OutputIndex:  o.GetOutputIndex(),
			Text:         textOf(o.GetContent()),
			TokenIDs:     o.GetTokenIds(),
			FinishReason: finished.Reason,
			Matched:      finished.Matched,
			Logprobs:     logprobsFromProto(o.GetLogprobs()),
			Score:        finished.Score,
		})
	}
	made.PromptLogprobs = joinedPrompt(response.GetPromptLogprobs())
	return made, nil
}

func joinedPrompt(parts []*headracev1.PromptLogprobs) *PromptLogprobs {
	var joined transcript
	for _, part := range parts {
		joined.addPrompt(promptLogprobsFromProto(part))
	}
	return joined.prompt
}

// checkFinished refuses the end of an output that may not be shown as an answer.
func checkFinished(finished *OutputFinished, requestID string) error {
	switch {
	case finished == nil:
		return broken(requestID, "the generation is done, but an output never finished")
	case finished.Reason == FinishError && finished.Err == nil:
		return broken(requestID, "the engine could not go on with this output")
	case finished.Reason == FinishError:
		failure := *finished.Err
		failure.RequestID = cmp.Or(failure.RequestID, requestID)
		return &failure
	default:
		return nil
	}
}
