package io.persistshard.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.BufferedWriter;
import java.io.IOException;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.Channels;
import java.nio.channels.SocketChannel;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.SparkContext;
import org.apache.spark.api.python.PythonUtils;
import org.apache.spark.scheduler.SparkListener;
import org.apache.spark.scheduler.SparkListenerApplicationEnd;
import scala.jdk.javaapi.CollectionConverters;

/**
 * The Python process behind a catalog (persist_spark.catalog.main), and the requests to it. All work on shards happens there. For frames
 * of format persist, the driver's own process takes its place. All catalogs of an application with the same stores share one process.
 * It ends with the application, or with the JVM, because the JVM's end of the pipe closes then.
 */
final class Desk {
  static final ObjectMapper JSON = new ObjectMapper();
  private static final Map<List<String>, Desk> DESKS = new ConcurrentHashMap<>();

  /** Null for the driver's own process, which ends with the JVM. */
  private final Process process;
  private final UnixDomainSocketAddress address;

  private Desk(Process process, String address) {
    this.process = process;
    this.address = UnixDomainSocketAddress.of(address);
  }

  /** The desk of the driver's own process, at the path of its socket. */
  static Desk of(String address) {
    return new Desk(null, address);
  }

  /** The running process for these stores. Starts it if it is not running. */
  static Desk at(String catalog, Map<String, String> stores) {
    SparkContext context = SparkContext.getOrCreate();
    List<String> key = List.of(context.applicationId(), stores.get("blob"), stores.get("consensus"));
    return DESKS.compute(key, (same, running) -> running != null && running.process.isAlive() ? running : start(catalog, stores, context));
  }

  /** The answer to the request `what` with the fields of `request`. Throws IllegalArgumentException with the refusal of the process. */
  JsonNode ask(String what, ObjectNode request) {
    request.put("ask", what);
    JsonNode answer;
    try (SocketChannel channel = SocketChannel.open(address)) {
      ByteBuffer bytes = ByteBuffer.wrap(JSON.writeValueAsBytes(request));
      while (bytes.hasRemaining()) channel.write(bytes);
      channel.shutdownOutput();
      answer = JSON.readTree(Channels.newInputStream(channel));
    } catch (IOException error) {
      throw new IllegalStateException("the Python process of the catalog does not answer; its messages are on standard error. "
          + "The next statement starts it again", error);
    }
    if (answer.hasNonNull("refused")) throw new IllegalArgumentException(answer.get("refused").asText());
    return answer.path("is");
  }

  /** Releases a frame. The garbage collector's thread calls it, so a process that has ended is no error. */
  void dropFrame(String name) {
    if (process != null && !process.isAlive()) return;
    try {
      ask("drop_frame", JSON.createObjectNode().put("frame", name));
    } catch (IllegalStateException | IllegalArgumentException ended) {
      // The lease will expire.
    }
  }

  private static Desk start(String catalog, Map<String, String> stores, SparkContext context) {
    // -P: a file beside the program must not replace a module.
    ProcessBuilder command = new ProcessBuilder(python(context), "-P", "-m", "persist_spark.catalog.main");
    command.redirectError(ProcessBuilder.Redirect.INHERIT);
    String path = command.environment().getOrDefault("PYTHONPATH", "");
    command.environment().put("PYTHONPATH",
        PythonUtils.mergePythonPaths(CollectionConverters.asScala(List.of(path, PythonUtils.sparkPythonPath())).toSeq()));
    String problem = "catalog " + catalog + ": could not start its Python process, " + String.join(" ", command.command());
    try {
      Process process = command.start();
      BufferedWriter input = process.outputWriter(StandardCharsets.UTF_8);
      // The stores go to standard input, because all users of the machine can see the arguments of a process.
      input.write(JSON.writeValueAsString(stores) + "\n");
      input.flush();
      BufferedReader output = process.inputReader(StandardCharsets.UTF_8);
      String line = output.readLine();
      if (line == null) throw new IllegalStateException(problem
          + ". Set PYSPARK_PYTHON to an interpreter that has persist_spark; its messages are on standard error");
      context.addSparkListener(new SparkListener() {
        @Override
        public void onApplicationEnd(SparkListenerApplicationEnd end) {
          DESKS.values().removeIf(desk -> desk.process == process);
          close(input);
        }
      });
      return new Desk(process, JSON.readTree(line).get("desk").asText());
    } catch (IOException error) {
      throw new IllegalStateException(problem + ": " + error.getMessage(), error);
    }
  }

  /** The interpreter of Spark's own workers. */
  private static String python(SparkContext context) {
    String given = System.getenv().getOrDefault("PYSPARK_PYTHON", "python3");
    return context.conf().get("spark.pyspark.python", given);
  }

  private static void close(BufferedWriter input) {
    try {
      input.close();
    } catch (IOException ended) {
      // The process has ended already.
    }
  }
}
