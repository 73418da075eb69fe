import io.github.headrace.GenerationEvent.Delta;
import io.github.headrace.GenerationEvent.OutputFinished;
import io.github.headrace.GenerationOptions;
import io.github.headrace.HeadraceClient;
import io.github.headrace.Session;
import io.github.headrace.SessionEvent;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** Many generations over one call, as a gateway wants them. */
public class Gateway {
    public static void main(String[] args) {
        String server = args.length > 0 ? args[0] : "127.0.0.1:50051";
        GenerationOptions options =
                GenerationOptions.builder().maxTokens(24).stop(".", "\n").temperature(0).build();
        Map<Integer, String> texts = new HashMap<>();
        try (HeadraceClient client = HeadraceClient.builder(server).build();
                Session session = client.session()) {
            for (String prompt : List.of("Once upon a time", "The capital of France is", "2 + 2 =")) {
                texts.put(session.submit(prompt, options).streamId(), prompt);
            }
            session.finish();
            for (SessionEvent event : session.events()) {
                if (event.error() != null) {
                    System.out.println(event.streamId() + " failed: " + event.error().getMessage());
                } else if (event.event() instanceof Delta delta) {
                    texts.merge(event.streamId(), delta.text(), String::concat);
                } else if (event.event() instanceof OutputFinished finished) {
                    System.out.println(texts.get(event.streamId()) + " (" + finished.reason() + ")");
                }
            }
        }
    }
}
