import com.google.gson.Gson;
import io.github.headrace.ChatMessage;
import io.github.headrace.Completion;
import io.github.headrace.Conversation;
import io.github.headrace.GenerationOptions;
import io.github.headrace.GenerationStream;
import io.github.headrace.HeadraceClient;
import io.github.headrace.Tool;
import io.github.headrace.ToolCall;
import io.github.headrace.ToolUse;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;

/** Questions that the model answers with a function of this program. */
public class Tools {
    private static final Tool WEATHER = new Tool("weather", "The weather of a city.", """
            {"type": "object", "properties": {"city": {"type": "string"}},
             "required": ["city"], "additionalProperties": false}""");

    /** Invented; a real program would ask a weather service. */
    private static final Map<String, String> REPORTS = Map.of(
            "Oslo", "{\"sky\": \"snowy\", \"temperature\": -3}", "Paris", "{\"sky\": \"sunny\", \"temperature\": 21}");

    private static final int MOST_CALLS = 4;

    record Place(String city) {}

    /** What the model gets when it calls the function with these arguments. */
    static String weather(String arguments) {
        Place place = new Gson().fromJson(arguments, Place.class);
        return REPORTS.getOrDefault(place.city(), "{\"error\": \"no report from there\"}");
    }

    /** Has the model answer what was said, with as many calls as it needs. */
    static String answer(HeadraceClient client, List<ChatMessage> said) {
        GenerationOptions options = GenerationOptions.builder().maxTokens(64).build();
        for (int calls = 0; calls < MOST_CALLS; calls++) {
            Conversation conversation = Conversation.of(said).with(ToolUse.of(WEATHER));
            try (GenerationStream stream = client.chat(conversation, options)) {
                Completion output = stream.result();
                said.add(output.message());
                if (output.toolCalls().isEmpty()) {
                    return output.text();
                }
                for (ToolCall call : output.toolCalls()) {
                    System.out.println("  " + call.name() + "(" + call.arguments() + ")");
                    said.add(ChatMessage.toolResult(call, weather(call.arguments())));
                }
            }
        }
        throw new IllegalStateException("no answer after " + MOST_CALLS + " calls");
    }

    public static void main(String[] args) {
        String server = args.length > 0 ? args[0] : "127.0.0.1:50051";
        List<ChatMessage> said = new ArrayList<>();
        try (HeadraceClient client = HeadraceClient.builder(server).build()) {
            for (String question : List.of("What is the weather in Paris?", "And in Oslo?")) {
                System.out.println(question);
                said.add(ChatMessage.user(question));
                System.out.println(answer(client, said));
            }
        }
    }
}
