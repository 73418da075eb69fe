// What a generation is asked for: prompts, conversations, and one option for every field of
// GenerationSpec. Owns their Go shape and not their ranges: the server knows those and refuses with
// field, rule and limit.

package headrace

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/headrace/headrace/clients/go/headracev1"
)

// Prompt is what a generation continues: [Text] or [TokenIDs].
type Prompt interface {
	set(spec *headracev1.GenerationSpec)
}

// Text is a prompt as UTF-8 text, which the model's tokenizer encodes.
type Text string

// TokenIDs is a prompt as tokens, used as they are.
type TokenIDs []uint32

func (t Text) set(spec *headracev1.GenerationSpec) {
	spec.Prompt = &headracev1.GenerationSpec_Text{Text: string(t)}
}

func (ids TokenIDs) set(spec *headracev1.GenerationSpec) {
	spec.Prompt = &headracev1.GenerationSpec_TokenIds{TokenIds: &headracev1.TokenIds{Ids: ids}}
}

// Message is one message of a conversation. Make it with [System], [User], [Assistant] or
// [ToolResult], or take what the model said from [Completion.Message].
type Message struct {
	Role headracev1.Role
	Text string
	// ToolCalls are the functions that the assistant called.
	ToolCalls []ToolCall
	// ToolCallID is the call whose result this is.
	ToolCallID string
	// Reasoning is what the assistant had written for itself.
	Reasoning string
}

// System is the operator's instructions.
func System(text string) Message { return Message{Role: headracev1.Role_ROLE_SYSTEM, Text: text} }

// User is what the person said.
func User(text string) Message { return Message{Role: headracev1.Role_ROLE_USER, Text: text} }

// Assistant is what the model said.
func Assistant(text string) Message { return Message{Role: headracev1.Role_ROLE_ASSISTANT, Text: text} }

// ToolResult is what a function that the model had called returned.
func ToolResult(call ToolCall, text string) Message {
	return Message{Role: headracev1.Role_ROLE_TOOL, Text: text, ToolCallID: call.ID}
}

// Tool is a function that the model may call.
type Tool = headracev1.Tool

// GenerationOption sets a field of the spec of a generation; absent fields take the model's own
// default, then the server's. A function of yours will do as well. Every GenerationOption is a
// [ChatOption], a [SubmitOption] and a [SessionOption].
type GenerationOption func(*headracev1.GenerationSpec)

// ChatOption is what [Client.Chat] takes.
type ChatOption interface {
	applyToChat(*headracev1.ChatRequest)
}

// SubmitOption is what [Client.Submit] takes.
type SubmitOption interface {
	applyToSubmit(*headracev1.SubmitRequest)
}

// SessionOption is what [Session.Submit] takes.
type SessionOption interface {
	applyToSession(*headracev1.SessionSubmit)
}

// ConversationOption is what [Client.Chat] and [Session.SubmitChat] take.
type ConversationOption interface {
	ChatOption
	SessionOption
}

func (set GenerationOption) applyToChat(r *headracev1.ChatRequest)      { set(r.GetSpec()) }
func (set GenerationOption) applyToSubmit(r *headracev1.SubmitRequest)  { set(r.GetSpec()) }
func (set GenerationOption) applyToSession(r *headracev1.SessionSubmit) { set(r.GetSpec()) }
func (set chatOption) applyToChat(r *headracev1.ChatRequest)            { set.chat(r) }
func (set chatOption) applyToSession(r *headracev1.SessionSubmit)       { set.session(r) }
func (key idempotencyKey) applyToSubmit(r *headracev1.SubmitRequest)    { r.IdempotencyKey = string(key) }
func (key idempotencyKey) applyToSession(r *headracev1.SessionSubmit)   { r.IdempotencyKey = string(key) }
func (detached detachedOption) applyToSession(r *headracev1.SessionSubmit) {
	r.Detached = (*bool)(&detached)
}

type (
	chatOption struct {
		chat    func(*headracev1.ChatRequest)
		session func(*headracev1.SessionSubmit)
	}
	idempotencyKey string
	detachedOption bool
)

// Options is several options as one.
func Options(options ...GenerationOption) GenerationOption {
	return func(spec *headracev1.GenerationSpec) {
		for _, option := range options {
			option(spec)
		}
	}
}

// WithModel names the model. Default: the server's default model.
func WithModel(name string) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { spec.Model = name }
}

// WithTemperature divides the logits; 0 is greedy. 0, or 0.01 to 100.
func WithTemperature(value float32) GenerationOption {
	return sampling(func(s *headracev1.SamplingParameters) { s.Temperature = &value })
}

// WithTopP keeps the most likely tokens whose probabilities reach this sum. Above 0, to 1.
func WithTopP(value float32) GenerationOption {
	return sampling(func(s *headracev1.SamplingParameters) { s.TopP = &value })
}

// WithTopK keeps this many of the most likely tokens; 0 and -1 keep all.
func WithTopK(value int32) GenerationOption {
	return sampling(func(s *headracev1.SamplingParameters) { s.TopK = &value })
}

// WithMinP keeps tokens at least this likely relative to the most likely one. 0 to 1.
func WithMinP(value float32) GenerationOption {
	return sampling(func(s *headracev1.SamplingParameters) { s.MinP = &value })
}

// WithTopNSigma keeps logits at most this many standard deviations below the highest one; 0 keeps
// all. 0 to 100.
func WithTopNSigma(value float32) GenerationOption {
	return sampling(func(s *headracev1.SamplingParameters) { s.TopNSigma = &value })
}

// WithRepetitionPenalty divides positive and multiplies negative logits of tokens seen. 0.01 to 10.
func WithRepetitionPenalty(value float32) GenerationOption {
	return sampling(func(s *headracev1.SamplingParameters) { s.RepetitionPenalty = &value })
}

// WithPresencePenalty is subtracted from the logits of tokens in the output. -2 to 2.
func WithPresencePenalty(value float32) GenerationOption {
	return sampling(func(s *headracev1.SamplingParameters) { s.PresencePenalty = &value })
}

// WithFrequencyPenalty is subtracted once for each time the output contains the token. -2 to 2.
func WithFrequencyPenalty(value float32) GenerationOption {
	return sampling(func(s *headracev1.SamplingParameters) { s.FrequencyPenalty = &value })
}

// WithSeed is the seed of the sampling noise.
func WithSeed(value uint64) GenerationOption {
	return sampling(func(s *headracev1.SamplingParameters) { s.Seed = &value })
}

// WithLogitBias is added to the logits of these tokens. At most 1,024 entries, -100 to 100.
func WithLogitBias(bias map[uint32]float32) GenerationOption {
	return sampling(func(s *headracev1.SamplingParameters) { s.LogitBias = bias })
}

// WithStop ends the output at one of these strings; the text ends before the match. At most 16.
func WithStop(texts ...string) GenerationOption {
	return stop(func(s *headracev1.StopConditions) { s.Strings = texts })
}

// WithStopTokens ends the output at one of these tokens, besides the model's own. At most 64.
func WithStopTokens(ids ...uint32) GenerationOption {
	return stop(func(s *headracev1.StopConditions) { s.TokenIds = ids })
}

// WithMaxTokens is the most tokens per output. At least 1.
func WithMaxTokens(count uint32) GenerationOption {
	return stop(func(s *headracev1.StopConditions) { s.MaxTokens = &count })
}

// WithMinTokens is the fewest tokens per output.
func WithMinTokens(count uint32) GenerationOption {
	return stop(func(s *headracev1.StopConditions) { s.MinTokens = &count })
}

// WithIgnoreEOS says whether to go on past the model's end-of-text tokens.
func WithIgnoreEOS(ignore bool) GenerationOption {
	return stop(func(s *headracev1.StopConditions) { s.IgnoreEos = &ignore })
}

// WithBadWords are never generated. At most 64.
func WithBadWords(words ...string) GenerationOption {
	return stop(func(s *headracev1.StopConditions) { s.BadWords = words })
}

// WithIncludeStopString says whether a matched stop string stays in the text.
func WithIncludeStopString(include bool) GenerationOption {
	return stop(func(s *headracev1.StopConditions) { s.IncludeStopString = &include })
}

// WithOutputs samples n outputs from the prompt in parallel. 1 to 128.
func WithOutputs(n uint32) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { spec.N = &n }
}

// WithLogprobs reports this many of the most likely tokens beside each sampled one; 0 reports the
// sampled token alone. 0 to 20.
func WithLogprobs(top uint32) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { spec.Logprobs = &top }
}

// WithPromptLogprobs reports this many of the most likely tokens at each position of the prompt. 0
// to 20.
func WithPromptLogprobs(top uint32) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { spec.PromptLogprobs = &top }
}

// WithPriority lets requests of higher priority run first. -100 to 100.
func WithPriority(priority int32) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { spec.Priority = &priority }
}

// WithTimeLimit is the longest time from acceptance to the last token; then the outputs end with
// [FinishDeadline], which is no error. At most 24 hours.
func WithTimeLimit(limit time.Duration) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { spec.TimeLimit = durationpb.New(limit) }
}

// WithCacheSalt shares cached prefixes only with requests of the same salt. At most 256 bytes.
func WithCacheSalt(salt string) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { spec.CacheSalt = salt }
}

// WithSkipSpecialTokens says whether special tokens are left out of the text. Default true.
func WithSkipSpecialTokens(skip bool) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { spec.SkipSpecialTokens = &skip }
}

// WithTokenIDsOnly leaves the text out of deltas and does not wait for whole characters.
func WithTokenIDsOnly(only bool) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { spec.TokenIdsOnly = &only }
}

// WithTraceDetail says how much of each token's way is traced, if the generation is traced at all.
// Default: the server's setting.
func WithTraceDetail(detail TraceDetail) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { spec.TraceDetail = detail }
}

// WithMaxReasoningTokens limits what each output of a conversation may spend on its reasoning; at
// least 1. Default: no limit but that of the output.
func WithMaxReasoningTokens(most uint32) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { spec.MaxReasoningTokens = &most }
}

// ReasoningEffort is how much a model is to reason before it answers.
type ReasoningEffort = headracev1.ReasoningEffort

// The efforts of reasoning.
const (
	EffortLow    = headracev1.ReasoningEffort_REASONING_EFFORT_LOW
	EffortMedium = headracev1.ReasoningEffort_REASONING_EFFORT_MEDIUM
	EffortHigh   = headracev1.ReasoningEffort_REASONING_EFFORT_HIGH
)

// WithReasoningEffort says how much the model is to reason before it answers; conversations only,
// with a model whose chat template takes it. Default: the template's.
func WithReasoningEffort(effort ReasoningEffort) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { spec.ReasoningEffort = effort }
}

// WithMaxDrafts lets a step verify at most so many drafted tokens for an output, 1 to 8, where the
// server drafts; 0: none. Answers are the same. Default: the server's setting.
func WithMaxDrafts(most uint32) GenerationOption {
	speculation := &headracev1.Speculation{Mode: &headracev1.Speculation_MaxDrafts{MaxDrafts: most}}
	if most == 0 {
		speculation.Mode = &headracev1.Speculation_Off{Off: true}
	}
	return func(spec *headracev1.GenerationSpec) { spec.Speculation = speculation }
}

// WithJSONSchema asks for outputs that a JSON Schema (as JSON text) allows. Of this and the forms
// after it the last one that is given counts.
func WithJSONSchema(schema string) GenerationOption {
	return form(&headracev1.StructuredOutput{Form: &headracev1.StructuredOutput_JsonSchema{JsonSchema: schema}})
}

// WithJSONObject asks for outputs that are JSON objects.
func WithJSONObject() GenerationOption {
	object := &headracev1.StructuredOutput_JsonObject{JsonObject: &headracev1.JsonObject{}}
	return form(&headracev1.StructuredOutput{Form: object})
}

// WithRegex asks for outputs that a regular expression matches as a whole.
func WithRegex(expression string) GenerationOption {
	return form(&headracev1.StructuredOutput{Form: &headracev1.StructuredOutput_Regex{Regex: expression}})
}

// WithChoice asks for outputs that are one of some texts.
func WithChoice(texts ...string) GenerationOption {
	choice := &headracev1.StructuredOutput_Choice{Choice: &headracev1.Choice{Texts: texts}}
	return form(&headracev1.StructuredOutput{Form: choice})
}

// StructuralTag is a part of an output that has a form, as soon as the text has come to its trigger.
type StructuralTag = headracev1.StructuralTag

// WithStructuralTags asks for free text in which parts have a form.
func WithStructuralTags(tags ...*StructuralTag) GenerationOption {
	all := &headracev1.StructuredOutput_StructuralTags{StructuralTags: &headracev1.StructuralTags{Tags: tags}}
	return form(&headracev1.StructuredOutput{Form: all})
}

// WithGrammar asks for outputs of a context-free grammar in Lark's notation.
func WithGrammar(grammar string) GenerationOption {
	return form(&headracev1.StructuredOutput{Form: &headracev1.StructuredOutput_Grammar{Grammar: grammar}})
}

// WithBestOf samples so many outputs, n to 20, of which the n with the largest mean log probability
// come whole, at the end.
func WithBestOf(count uint32) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { spec.BestOf = &count }
}

// WithBeamSearch searches for the n most likely outputs instead of sampling: they come whole, at the
// end. The width is 1 to 16 and at least n; log probabilities are divided by the length to the power
// of lengthPenalty, usually 1.
func WithBeamSearch(width uint32, lengthPenalty float32) GenerationOption {
	return func(spec *headracev1.GenerationSpec) {
		search := beamSearchOf(spec)
		search.Width, search.LengthPenalty = width, &lengthPenalty
	}
}

// When a beam search ends that has found as many whole outputs as it is wide: when no other one would
// be better if it ended at its length, at once, or when no other one can become better.
const (
	StopByHeuristic = headracev1.EarlyStopping_EARLY_STOPPING_HEURISTIC
	StopWhenFull    = headracev1.EarlyStopping_EARLY_STOPPING_FULL
	StopNever       = headracev1.EarlyStopping_EARLY_STOPPING_NEVER
)

// WithEarlyStopping says when the search of [WithBeamSearch] ends; [StopByHeuristic] is usual.
func WithEarlyStopping(when headracev1.EarlyStopping) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { beamSearchOf(spec).EarlyStopping = when }
}

func beamSearchOf(spec *headracev1.GenerationSpec) *headracev1.BeamSearch {
	if spec.BeamSearch == nil {
		spec.BeamSearch = &headracev1.BeamSearch{}
	}
	return spec.BeamSearch
}

// WithContinueLastMessage lets the model continue the last message, which must be the assistant's,
// instead of answering it.
func WithContinueLastMessage(doContinue bool) ConversationOption {
	return chatOption{
		chat:    func(r *headracev1.ChatRequest) { r.ContinueLastMessage = &doContinue },
		session: func(r *headracev1.SessionSubmit) { r.ContinueLastMessage = &doContinue },
	}
}

// WithTools are functions that the model may call.
func WithTools(tools ...*Tool) ConversationOption {
	return chatOption{
		func(r *headracev1.ChatRequest) { r.Tools = tools },
		func(r *headracev1.SessionSubmit) { r.Tools = tools },
	}
}

// WithToolChoice says whether the model calls functions: "auto", "none", "required", or the name of
// the one that it must call. Default: "auto".
func WithToolChoice(choice string) ConversationOption {
	made := &headracev1.ToolChoice{Choice: &headracev1.ToolChoice_Name{Name: choice}}
	if mode, is := toolChoiceModes[choice]; is {
		made.Choice = &headracev1.ToolChoice_Mode{Mode: mode}
	}
	return chatOption{
		func(r *headracev1.ChatRequest) { r.ToolChoice = made },
		func(r *headracev1.SessionSubmit) { r.ToolChoice = made },
	}
}

var toolChoiceModes = map[string]headracev1.ToolChoiceMode{
	"auto":     headracev1.ToolChoiceMode_TOOL_CHOICE_MODE_AUTO,
	"none":     headracev1.ToolChoiceMode_TOOL_CHOICE_MODE_NONE,
	"required": headracev1.ToolChoiceMode_TOOL_CHOICE_MODE_REQUIRED,
}

// WithParallelToolCalls says whether one output may call several functions. Default: true.
func WithParallelToolCalls(parallel bool) ConversationOption {
	return chatOption{
		func(r *headracev1.ChatRequest) { r.ParallelToolCalls = &parallel },
		func(r *headracev1.SessionSubmit) { r.ParallelToolCalls = &parallel },
	}
}

// WithIdempotencyKey names a submission: the same key and the same spec are the same request, also
// when it is sent again. At most 256 bytes. Default: [Client.Submit] draws one.
func WithIdempotencyKey(key string) interface {
	SubmitOption
	SessionOption
} {
	return idempotencyKey(key)
}

// WithDetached says whether a session's generation outlives the session, as with [Client.Submit].
// Default false.
func WithDetached(detached bool) SessionOption { return detachedOption(detached) }

func sampling(set func(*headracev1.SamplingParameters)) GenerationOption {
	return func(spec *headracev1.GenerationSpec) {
		if spec.Sampling == nil {
			spec.Sampling = &headracev1.SamplingParameters{}
		}
		set(spec.Sampling)
	}
}

func stop(set func(*headracev1.StopConditions)) GenerationOption {
	return func(spec *headracev1.GenerationSpec) {
		if spec.Stop == nil {
			spec.Stop = &headracev1.StopConditions{}
		}
		set(spec.Stop)
	}
}

func form(structured *headracev1.StructuredOutput) GenerationOption {
	return func(spec *headracev1.GenerationSpec) { spec.StructuredOutput = structured }
}

func chatMessages(messages []Message) []*headracev1.ChatMessage {
	var made []*headracev1.ChatMessage
	for _, m := range messages {
		message := &headracev1.ChatMessage{Role: m.Role, ToolCallId: m.ToolCallID}
		if m.Reasoning != "" {
			part := &headracev1.Part{Kind: &headracev1.Part_Reasoning{Reasoning: m.Reasoning}}
			message.Parts = append(message.Parts, part)
		}
		if m.Text != "" || len(m.ToolCalls) == 0 {
			part := &headracev1.Part{Kind: &headracev1.Part_Text{Text: m.Text}}
			message.Parts = append(message.Parts, part)
		}
		for _, call := range m.ToolCalls {
			sent := &headracev1.ToolCall{Id: call.ID, Name: call.Name, ArgumentsJson: call.Arguments}
			message.ToolCalls = append(message.ToolCalls, sent)
		}
		made = append(made, message)
	}
	return made
}
