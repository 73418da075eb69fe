// A sentence that the model turns into a struct. Run: go run . [SERVER]
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"

	headrace "github.com/headrace/headrace/clients/go"
)

// Person is what is to be known of somebody.
type Person struct {
	Name string `json:"name"`
	Age  int    `json:"age"`
	City string `json:"city"`
}

const schema = `{"type": "object", "properties": {
	"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
	"required": ["name", "age", "city"], "additionalProperties": false}`

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

	question := "Extract name, age, city as JSON: Clara Weber is 34 years old and lives in Lisbon."
	answer, err := client.Chat(context.Background(), []headrace.Message{headrace.User(question)},
		headrace.WithJSONSchema(schema), headrace.WithMaxTokens(64)).Result()
	if err != nil {
		log.Fatal(err)
	}
	var person Person
	if err := json.Unmarshal([]byte(answer.Text()), &person); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%+v\n", person)
}
