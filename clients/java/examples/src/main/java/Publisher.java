import io.github.headrace.GenerationEvent;
import io.github.headrace.GenerationEvent.Delta;
import io.github.headrace.GenerationOptions;
import io.github.headrace.HeadraceClient;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Flow;

/** A stream as a Flow.Publisher: the subscriber sets the pace. */
public class Publisher {
    public static void main(String[] args) throws InterruptedException {
        String server = args.length > 0 ? args[0] : "127.0.0.1:50051";
        GenerationOptions options = GenerationOptions.builder().maxTokens(32).build();
        try (HeadraceClient client = HeadraceClient.builder(server).build()) {
            Printer printer = new Printer();
            client.flow().generate("Once upon a time", options).subscribe(printer);
            printer.ended.await();
        }
    }

    /** Asks for one event at a time. */
    static class Printer implements Flow.Subscriber<GenerationEvent> {
        final CountDownLatch ended = new CountDownLatch(1);
        private Flow.Subscription subscription;

        @Override
        public void onSubscribe(Flow.Subscription given) {
            subscription = given;
            subscription.request(1);
        }

        @Override
        public void onNext(GenerationEvent event) {
            if (event instanceof Delta delta) {
                System.out.print(delta.text());
            }
            subscription.request(1);
        }

        @Override
        public void onError(Throwable failure) {
            System.out.println("failed: " + failure.getMessage());
            ended.countDown();
        }

        @Override
        public void onComplete() {
            System.out.println(" (done)");
            ended.countDown();
        }
    }
}
