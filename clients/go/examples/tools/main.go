// A question that the model answers with a function. Run: go run . [SERVER]
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"

	headrace "github.com/headrace/headrace/clients/go"
)

var weather = &headrace.Tool{
	Name:        "weather",
	Description: "The weather of a city.",
	ParametersJsonSchema: `{"type": "object", "properties": {"city": {"enum": ["Oslo", "Paris"]}},
		"required": ["city"], "additionalProperties": false}`,
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
	ctx := context.Background()

	said := []headrace.Message{headrace.User("What is the weather in Paris?")}
	choice := "required"
	for {
		answer, err := client.Chat(ctx, said,
			headrace.WithTools(weather), headrace.WithToolChoice(choice), headrace.WithParallelToolCalls(false),
			headrace.WithMaxTokens(64)).Result()
		if err != nil {
			log.Fatal(err)
		}
		said = append(said, answer.Message())
		if len(answer.ToolCalls()) == 0 {
			fmt.Println(answer.Text())
			return
		}
		for _, call := range answer.ToolCalls() {
			var arguments struct{ City string }
			if err := json.Unmarshal([]byte(call.Arguments), &arguments); err != nil {
				log.Fatal(err)
			}
			fmt.Printf("%s(%s)\n", call.Name, arguments.City)
			said = append(said, headrace.ToolResult(call, "Sunny in "+arguments.City+"."))
		}
		choice = "none"
	}
}
