import com.google.gson.Gson;
import io.github.headrace.Conversation;
import io.github.headrace.GenerationOptions;
import io.github.headrace.GenerationStream;
import io.github.headrace.HeadraceClient;

/** A sentence that the model turns into a record. */
public class Schema {
    private static final String SCHEMA = """
            {"type": "object",
             "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
             "required": ["name", "age", "city"], "additionalProperties": false}""";

    record Person(String name, int age, String city) {}

    public static void main(String[] args) {
        String server = args.length > 0 ? args[0] : "127.0.0.1:50051";
        GenerationOptions options =
                GenerationOptions.builder().maxTokens(64).jsonSchema(SCHEMA).build();
        String question = "Extract name, age, city as JSON: Clara Weber is 34 years old and lives in Lisbon.";
        try (HeadraceClient client = HeadraceClient.builder(server).build();
                GenerationStream stream = client.chat(Conversation.of(question), options)) {
            System.out.println(new Gson().fromJson(stream.result().text(), Person.class));
        }
    }
}
