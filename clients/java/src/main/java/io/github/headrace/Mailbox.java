package io.github.headrace;

import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.Executor;
import java.util.concurrent.atomic.AtomicInteger;

/**
 * Runs tasks one at a time, in order, on the threads that bring them; a task may bring more. State
 * that only tasks touch needs no lock.
 */
final class Mailbox implements Executor {
    private final Queue<Runnable> tasks = new ConcurrentLinkedQueue<>();
    private final AtomicInteger size = new AtomicInteger();

    @Override
    public void execute(Runnable task) {
        tasks.add(task);
        if (size.getAndIncrement() != 0) {
            return;
        }
        do {
            run(tasks.remove());
        } while (size.decrementAndGet() > 0);
    }

    private static void run(Runnable task) {
        try {
            task.run();
        } catch (RuntimeException | Error thrown) {
            // The tasks after it must run all the same.
            Thread thread = Thread.currentThread();
            thread.getUncaughtExceptionHandler().uncaughtException(thread, thrown);
        }
    }
}
