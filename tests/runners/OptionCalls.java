import exportablecache.Session;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.stream.Collectors;

/** Calls of exportablecache.Session with adapters, shifts and options; one line of text for each, as option_calls.py prints it. */
final class OptionCalls {
  private final Session session;
  private final long[] prompt;

  private OptionCalls(Session session, long[] prompt) {
    this.session = session;
    this.prompt = prompt;
  }

  private static String refused(Runnable call) {
    try {
      call.run();
      return "nothing was refused";
    } catch (Session.Failure failure) {
      return failure.status + " " + failure.getMessage();
    }
  }

  /** The logits after the prompt, from an empty cache, as whole numbers that are exact for a float. */
  private String logits() {
    session.reset();
    return bits(session.prefill(prompt));
  }

  private static String bits(float[] logits) {
    List<String> found = new ArrayList<>();
    for (float number : logits) found.add(Integer.toString(Float.floatToIntBits(number)));
    return String.join(" ", found);
  }

  private String generated(Session.Options options) {
    session.reset();
    return continued(options);
  }

  private String continued(Session.Options options) {
    List<Long> tokens = new ArrayList<>();
    Session.Statistics found = session.generate(prompt, options, token -> tokens.add(token));
    return tokens.stream().map(String::valueOf).collect(Collectors.joining(" ")) + " " + found.proposedTokens + " " + found.acceptedTokens;
  }

  private static Session.Options limited() {
    Session.Options options = new Session.Options();
    options.maxNewTokens = 12;
    return options;
  }

  private void adapters(String folder, String state) {
    for (String name : new String[] {"one", "two"}) session.loadAdapter(folder + "/" + name + ".adapter", name);
    for (String name : new String[] {null, "one", "two", null}) {
      session.useAdapter(name);
      System.out.println(logits());
    }
    session.useAdapter("one");
    System.out.println(refused(() -> session.saveState(state)));
    session.unloadAdapter("one");
    System.out.println(logits());
    System.out.println(refused(() -> session.useAdapter("one")));
    System.out.println(refused(() -> session.unloadAdapter("one")));
    for (String bad : new String[] {"other.adapter", "rank.adapter", "nan.adapter", "cut.adapter", "missing.adapter", "peft", "peft/adapter_model.safetensors"}) {
      System.out.println(refused(() -> session.loadAdapter(folder + "/" + bad, "bad")));
    }
    System.out.println(refused(() -> session.loadAdapter(folder + "/one.adapter", "")));
  }

  private void shifts() {
    logits();
    session.shift(5, 4);
    System.out.println(session.length() + " " + bits(session.prefill(new long[] {7})));
    System.out.println(refused(() -> session.shift(0, 0)));
    Session.Options options = new Session.Options();
    options.maxNewTokens = 150;
    options.shiftWhenFull = true;
    options.protectedTokens = 8;
    options.logitBias = Collections.singletonMap(2L, -100.0);
    System.out.println(generated(options));
  }

  private void options() {
    System.out.println(generated(limited()));
    Session.Options options = limited();
    options.temperature = 4;
    options.minP = 0.3;
    options.seed = 3L;
    System.out.println(generated(options));
    options.minP = 0;
    System.out.println(generated(options));
    options = limited();
    options.repetitionPenalty = 3;
    System.out.println(generated(options));
    options = limited();
    options.presencePenalty = 4;
    System.out.println(generated(options));
    options.presencePenalty = 0;
    options.frequencyPenalty = 3;
    options.countedTokens = new long[] {340, 340, 340, 335};
    System.out.println(generated(options));
    options = limited();
    options.logitBias = Collections.singletonMap(7L, 100.0);
    System.out.println(generated(options));
    options = limited();
    session.reset();
    session.prefill(Arrays.copyOf(prompt, 30));
    options.cachedTokens = 30;
    System.out.println(continued(options) + " " + session.length());
    options = limited();
    options.alternatives = 3;
    options.onLogProbs = (own, tokens, all) -> System.out.println(Double.doubleToLongBits(own) + " " + Arrays.toString(tokens) + " " + Double.doubleToLongBits(all[2]));
    System.out.println(generated(options));
    System.out.println(refused(() -> session.render("[]")).split(" ")[0]);
    System.out.println(refused(() -> session.chatMessages("[]", limited(), piece -> true)).split(" ")[0]);
    System.out.println(refused(() -> session.addInput("pixel_values", new float[] {1, 2}, 1, 2)));
    System.out.println(refused(() -> session.addInput("grid", new long[] {1, 2}, 2)));
  }

  /** What only Java refuses. */
  private void ofJava() {
    Session.Options options = limited();
    options.onLogProbs = (own, tokens, all) -> { throw new IllegalArgumentException("from the log probabilities"); };
    List<Long> taken = new ArrayList<>();
    try {
      session.reset();
      session.generate(prompt, options, token -> taken.add(token));
    } catch (IllegalArgumentException failure) {
      System.out.println(failure.getMessage() + " " + taken.size() + " " + session.length());
    }
    for (long[] shape : new long[][] {{3}, {}, {0}, {2, 2}, {-1, -2}, {1L << 62, 4}}) {
      System.out.println(refused(() -> session.addInput("pixel_values", new float[] {1, 2}, shape)));
    }
    System.out.println(refused(() -> session.addInput("pixel_values", new float[] {}, 0)));
    System.out.println(refused(() -> session.addInput("pixel_values", (float[]) null, 1)));
    System.out.println(refused(() -> session.loadAdapter("a", null)));
    System.out.println(refused(() -> session.useAdapter("a\0b")));
    Session.Options nothing = limited();
    nothing.logitBias = Collections.singletonMap(7L, null);
    System.out.println(refused(() -> session.generate(prompt, nothing, token -> true)));
    nothing.logitBias = null;
    System.out.println(refused(() -> session.generate(prompt, nothing, token -> true)));
    nothing.logitBias = Collections.emptyMap();
    nothing.countedTokens = null;
    System.out.println(refused(() -> session.generate(prompt, nothing, token -> true)));
  }

  public static void main(String[] arguments) {
    long[] prompt = Arrays.stream(arguments[3].split(" ")).mapToLong(Long::parseLong).toArray();
    Session.setThreads(1);
    try (Session session = new Session(arguments[0])) {
      OptionCalls calls = new OptionCalls(session, prompt);
      calls.adapters(arguments[2], arguments[4]);
      calls.shifts();
      calls.options();
      calls.ofJava();
    }
    try (Session session = new Session(arguments[1])) {
      // Its vocabulary is smaller.
      OptionCalls calls = new OptionCalls(session, Arrays.stream(prompt).map(token -> token % 100).toArray());
      Session.Options drafts = limited();
      System.out.println(calls.generated(drafts));
      drafts.draftTokens = 3;
      System.out.println(calls.generated(drafts));
      System.out.println(refused(() -> session.loadAdapter(arguments[2] + "/one.adapter", "one")).split(" ")[0]);
    }
  }
}
