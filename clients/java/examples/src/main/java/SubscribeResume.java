import io.github.headrace.GenerationEvent;
import io.github.headrace.GenerationEvent.Delta;
import io.github.headrace.GenerationOptions;
import io.github.headrace.GenerationStream;
import io.github.headrace.HeadraceClient;
import io.github.headrace.Submitted;

/** A generation that outlives its reader: read some tokens, leave, come back for the rest. */
public class SubscribeResume {
    public static void main(String[] args) {
        String server = args.length > 0 ? args[0] : "127.0.0.1:50051";
        GenerationOptions options = GenerationOptions.builder()
                .maxTokens(48)
                .temperature(0)
                .ignoreEos(true)
                .build();
        try (HeadraceClient client = HeadraceClient.builder(server).build()) {
            Submitted submitted = client.submit("Once upon a time", options);
            StringBuilder text = new StringBuilder();
            int seen = 0;
            try (GenerationStream stream = client.subscribe(submitted.requestId())) {
                for (GenerationEvent event : stream) {
                    if (event instanceof Delta delta) {
                        text.append(delta.text());
                        seen = delta.firstTokenIndex() + delta.tokenIds().size();
                        if (seen >= 10) {
                            break;
                        }
                    }
                }
            }
            System.out.println("the first " + seen + " tokens: " + text);
            try (GenerationStream rest = client.subscribe(submitted.requestId(), seen)) {
                text.append(rest.result().text());
            }
            try (GenerationStream all = client.subscribe(submitted.requestId())) {
                boolean whole = all.result().text().contentEquals(text);
                System.out.println(whole ? "nothing lost, nothing doubled" : "the parts do not fit");
            }
        }
    }
}
