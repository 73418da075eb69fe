package headrace

import (
	"slices"
	"testing"

	pb "github.com/headrace/headrace/clients/go/headracev1"
)

// units of contents, a byte of text at a time.
func units(content []Content) []Content {
	var made []Content
	for _, piece := range content {
		for skipped := range lengthOf(piece) {
			switch piece := piece.(type) {
			case AnswerText:
				made = append(made, piece[skipped:skipped+1])
			case ReasoningText:
				made = append(made, piece[skipped:skipped+1])
			case ToolCallArguments:
				made = append(made, ToolCallArguments{piece.Index, piece.Delta[skipped : skipped+1]})
			default:
				made = append(made, piece)
			}
		}
	}
	return made
}

func TestContentsComeTypedAndAreCutAnywhere(t *testing.T) {
	wire := []*pb.Content{
		{Kind: &pb.Content_Reasoning{Reasoning: "so"}},
		{Kind: &pb.Content_Text{Text: "I look."}},
		{Kind: &pb.Content_ToolCallStarted{ToolCallStarted: &pb.ToolCallStarted{Id: "c", Name: "weather"}}},
		{Kind: &pb.Content_ToolCallArguments{ToolCallArguments: &pb.ToolCallArguments{Delta: `{"a": 1}`}}},
		{Kind: &pb.Content_ToolCallFinished{
			ToolCallFinished: &pb.ToolCallFinished{Arguments: `{"a": 1}`, Valid: true}}},
	}
	delta := deltaFromProto(&pb.Delta{TokenIds: []uint32{1}, Content: wire})
	if delta.Text != "I look." || delta.Reasoning() != "so" {
		t.Error(delta)
	}
	whole := units(delta.Content)
	for known := range delta.length() + 1 {
		if rest := delta.without(known); !slices.Equal(units(rest.Content), whole[known:]) {
			t.Error(known, rest)
		}
	}
	var read transcript
	read.add(delta)
	output := read.outputs[0]
	want := []ToolCall{{ID: "c", Name: "weather", Arguments: `{"a": 1}`, Valid: true}}
	if !slices.Equal(output.content.calls, want) || output.length != delta.length() {
		t.Error(output.content.calls)
	}
	if contentFromProto(wire[1:2]) != nil {
		t.Error("text alone is no content")
	}
}
