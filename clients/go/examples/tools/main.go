// Questions that the model answers with a function of this program. Run: go run . [SERVER]
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"

	headrace "github.com/headrace/headrace/clients/go"
)

const mostCalls = 4

var tool = &headrace.Tool{
	Name:        "weather",
	Description: "The weather of a city.",
	ParametersJsonSchema: `{"type": "object", "properties": {"city": {"type": "string"}},
		"required": ["city"], "additionalProperties": false}`,
}

// Invented; a real program would ask a weather service.
var reports = map[string]string{
	"Oslo":  `{"sky": "snowy", "temperature": -3}`,
	"Paris": `{"sky": "sunny", "temperature": 21}`,
}

// weather returns what the model gets when it calls the function with these arguments.
func weather(arguments string) (string, error) {
	var given struct{ City string }
	if err := json.Unmarshal([]byte(arguments), &given); err != nil {
		return "", err
	}
	if report, ok := reports[given.City]; ok {
		return report, nil
	}
	return `{"error": "no report from there"}`, nil
}

// answer has the model answer what was said, with as many calls as it needs. It returns the answer
// and the longer conversation.
func answer(ctx context.Context, client *headrace.Client, said []headrace.Message) (string, []headrace.Message, error) {
	for range mostCalls {
		output, err := client.Chat(ctx, said, headrace.WithTools(tool), headrace.WithMaxTokens(64)).Result()
		if err != nil {
			return "", nil, err
		}
		said = append(said, output.Message())
		if len(output.ToolCalls()) == 0 {
			return output.Text(), said, nil
		}
		for _, call := range output.ToolCalls() {
			fmt.Printf("  %s(%s)\n", call.Name, call.Arguments)
			result, err := weather(call.Arguments)
			if err != nil {
				return "", nil, err
			}
			said = append(said, headrace.ToolResult(call, result))
		}
	}
	return "", nil, fmt.Errorf("no answer after %d calls", mostCalls)
}

func main() {
	server := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		server = os.Args[1]
	}
	client, err := headrace.New(server)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	var said []headrace.Message
	for _, question := range []string{"What is the weather in Paris?", "And in Oslo?"} {
		fmt.Println(question)
		var text string
		text, said, err = answer(context.Background(), client, append(said, headrace.User(question)))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(text)
	}
}
