// What a delta holds besides text: reasoning, and calls of functions. Owns their Go shape, and how
// much of them was read before.

package headrace

import (
	"strings"

	"github.com/headrace/headrace/clients/go/headracev1"
)

// Content is a piece of what an output says: [AnswerText], [ReasoningText], [ToolCallStarted],
// [ToolCallArguments] or [ToolCallFinished].
type Content interface{ content() }

// AnswerText is text of the answer.
type AnswerText string

// ReasoningText is text that the model wrote for itself, before the answer.
type ReasoningText string

// ToolCallStarted: the model began to call a function.
type ToolCallStarted struct {
	// Index counts the output's calls from 0.
	Index uint32
	// ID names the call in the message that brings its result.
	ID, Name string
}

// ToolCallArguments is more of the JSON text of a call's arguments.
type ToolCallArguments struct {
	Index uint32
	Delta string
}

// ToolCallFinished: a call is over, with all of its arguments.
type ToolCallFinished struct {
	Index     uint32
	Arguments string
	// Valid: the call names one of the request's tools, and its arguments are one JSON object.
	Valid bool
}

func (AnswerText) content()        {}
func (ReasoningText) content()     {}
func (ToolCallStarted) content()   {}
func (ToolCallArguments) content() {}
func (ToolCallFinished) content()  {}

// ToolCall is a function that the model called.
type ToolCall struct {
	// ID names the call in the message that brings its result; see [ToolResult].
	ID, Name string
	// Arguments is JSON text.
	Arguments string
	// Valid: the call names one of the request's tools, and its arguments are one JSON object.
	Valid bool
}

// Reasoning is the text of a delta that the model wrote for itself.
func (d Delta) Reasoning() string {
	var text strings.Builder
	for _, piece := range d.Content {
		if reasoning, is := piece.(ReasoningText); is {
			text.WriteString(string(reasoning))
		}
	}
	return text.String()
}

// length of all contents: bytes of text count one each, as do beginnings and ends of calls.
func (d Delta) length() int {
	if len(d.Content) == 0 {
		return len(d.Text)
	}
	total := 0
	for _, piece := range d.Content {
		total += lengthOf(piece)
	}
	return total
}

// without is the delta less the first of its contents, by their length.
func (d Delta) without(known int) Delta {
	if len(d.Content) == 0 {
		d.Text = d.Text[known:]
		return d
	}
	var rest []Content
	var text strings.Builder
	for _, piece := range d.Content {
		skipped := min(known, lengthOf(piece))
		known -= skipped
		if skipped > 0 && skipped == lengthOf(piece) {
			continue
		}
		piece = cut(piece, skipped)
		if answer, is := piece.(AnswerText); is {
			text.WriteString(string(answer))
		}
		rest = append(rest, piece)
	}
	d.Content, d.Text = rest, text.String()
	return d
}

func lengthOf(piece Content) int {
	switch piece := piece.(type) {
	case AnswerText:
		return len(piece)
	case ReasoningText:
		return len(piece)
	case ToolCallArguments:
		return len(piece.Delta)
	default:
		return 1
	}
}

func cut(piece Content, length int) Content {
	switch piece := piece.(type) {
	case AnswerText:
		return piece[length:]
	case ReasoningText:
		return piece[length:]
	case ToolCallArguments:
		return ToolCallArguments{piece.Index, piece.Delta[length:]}
	default:
		return piece
	}
}

// contentFromProto is nil for what is text alone, as is a kind that is newer than this client.
func contentFromProto(content []*headracev1.Content) []Content {
	var made []Content
	isText := true
	for _, one := range content {
		switch kind := one.GetKind().(type) {
		case *headracev1.Content_Text:
			made = append(made, AnswerText(kind.Text))
			continue
		case *headracev1.Content_Reasoning:
			made = append(made, ReasoningText(kind.Reasoning))
		case *headracev1.Content_ToolCallStarted:
			started := kind.ToolCallStarted
			made = append(made, ToolCallStarted{started.GetIndex(), started.GetId(), started.GetName()})
		case *headracev1.Content_ToolCallArguments:
			arguments := kind.ToolCallArguments
			made = append(made, ToolCallArguments{arguments.GetIndex(), arguments.GetDelta()})
		case *headracev1.Content_ToolCallFinished:
			finished := kind.ToolCallFinished
			made = append(made, ToolCallFinished{finished.GetIndex(), finished.GetArguments(), finished.GetValid()})
		}
		isText = false
	}
	if isText {
		return nil
	}
	return made
}

// collected is the reasoning and the calls of one output, put together.
type collected struct {
	reasoning strings.Builder
	calls     []ToolCall
}

func (c *collected) add(content []Content) {
	for _, piece := range content {
		switch piece := piece.(type) {
		case ReasoningText:
			c.reasoning.WriteString(string(piece))
		case ToolCallStarted:
			call := c.call(piece.Index)
			call.ID, call.Name = piece.ID, piece.Name
		case ToolCallFinished:
			call := c.call(piece.Index)
			call.Arguments, call.Valid = piece.Arguments, piece.Valid
		}
	}
}

// call is the one with an index; of one whose beginning was not read, id and name are empty.
func (c *collected) call(index uint32) *ToolCall {
	for uint32(len(c.calls)) <= index {
		c.calls = append(c.calls, ToolCall{})
	}
	return &c.calls[index]
}
