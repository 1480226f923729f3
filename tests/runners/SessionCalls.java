import exportablecache.Session;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.stream.Collectors;

/** Calls of exportablecache.Session; one line of text for each. */
final class SessionCalls {
  private static long[] ids(String text) {
    return Arrays.stream(text.split(" ")).mapToLong(Long::parseLong).toArray();
  }

  private static String joined(List<Long> tokens) {
    return tokens.stream().map(String::valueOf).collect(Collectors.joining(" "));
  }

  private static String refused(Runnable call) {
    try {
      call.run();
      return "nothing was refused";
    } catch (Session.Failure failure) {
      return failure.status + " " + failure.getMessage();
    }
  }

  public static void main(String[] arguments) {
    String bundle = arguments[0], state = arguments[1], question = arguments[3];
    long[] prompt = ids(arguments[2]);
    System.out.println(refused(() -> Session.setThreads(0)));
    Session.setThreads(1);
    Session closed;
    try (Session session = new Session(bundle)) {
      closed = session;
      System.out.println(refused(() -> Session.setThreads(2)));
      Session.Options options = new Session.Options();
      options.maxNewTokens = 8;
      List<Long> tokens = new ArrayList<>();
      Session.Statistics statistics = session.generate(prompt, options, token -> tokens.add(token));
      System.out.println(joined(tokens));
      System.out.println(statistics.promptTokens + " " + statistics.generatedTokens + " " + statistics.stop);

      session.reset();
      float[] logits = session.prefill(prompt);
      session.saveState(state);
      float[] next = session.prefill(new long[] {7});
      try (Session other = new Session(bundle)) {
        other.loadState(state);
        System.out.println(other.length() + " " + other.maxLength() + " " + Arrays.equals(next, other.prefill(new long[] {7})));
      }
      session.rewind(1);
      System.out.println(session.length() + " " + logits.length);

      session.reset();
      StringBuilder text = new StringBuilder();
      session.generateText(question, new Session.Options(), piece -> text.append(piece) != null);
      System.out.println(text);
      System.out.println(joined(Arrays.stream(session.tokenize(question, true)).boxed().collect(Collectors.toList())));

      session.reset();
      StringBuilder answer = new StringBuilder();
      session.chat(question, "", new Session.Options(), piece -> answer.append(piece) != null);
      System.out.println(answer);

      session.reset();
      tokens.clear();
      options.stopStrings = new String[] {"2"};
      options.stopTokens = new long[] {3};
      options.temperature = 1.5;
      options.topK = 20;
      options.seed = 5L;
      statistics = session.generate(prompt, options, token -> {
        tokens.add(token);
        if (tokens.size() == 2) session.cancel();
        return true;
      });
      System.out.println(tokens.size() + " " + statistics.stop);

      Session.Options own = new Session.Options(), checkpoint = new Session.Options(), explicit = new Session.Options();
      checkpoint.fromCheckpoint = true;
      explicit.temperature = 4;
      explicit.topK = 50;
      // A bundle whose generation_config samples with the values of `explicit`.
      try (Session sampling = new Session(arguments[4])) {
        for (Session.Options asked : new Session.Options[] {own, checkpoint, explicit}) {
          asked.maxNewTokens = 8;
          asked.seed = 5L;
          sampling.reset();
          tokens.clear();
          sampling.generate(prompt, asked, token -> tokens.add(token));
          System.out.println(joined(tokens));
        }
      }
      session.reset();
      try {
        session.generate(prompt, new Session.Options(), token -> { throw new IllegalArgumentException("from the callback"); });
      } catch (IllegalArgumentException failure) {
        System.out.println(failure.getMessage());
      }
      session.reset();
      Session.Options bound = new Session.Options();
      tokens.clear();
      // Multiples of 7, and none after the third.
      bound.allowedTokens = (chosen, mask) -> {
        for (int token = 0; token < 32 * mask.length; token += 7) mask[token / 32] |= 1 << (token % 32);
        return chosen.length < 3 && (chosen.length == 0 || chosen[chosen.length - 1] == tokens.get(tokens.size() - 1));
      };
      statistics = session.generate(prompt, bound, token -> tokens.add(token));
      System.out.println(tokens.stream().allMatch(token -> token % 7 == 0) + " " + tokens.size() + " " + statistics.stop);
      bound.allowedTokens = (chosen, mask) -> true;
      System.out.println(refused(() -> session.generate(prompt, bound, token -> true)));
      bound.allowedTokens = (chosen, mask) -> { throw new IllegalArgumentException("from the mask"); };
      try {
        session.generate(prompt, bound, token -> true);
      } catch (IllegalArgumentException failure) {
        System.out.println(failure.getMessage());
      }
      System.out.println(refused(() -> session.prefill(new long[] {1000000})));
      System.out.println(refused(() -> session.encodeInput(new long[] {1})));
      System.out.println(refused(() -> session.encodeInput(new float[] {1})));
      System.out.println(refused(() -> session.loadState(bundle)));
      System.out.println(refused(() -> new Session(state)));
      System.out.println(refused(() -> session.prefill(null)));
      System.out.println(refused(() -> session.tokenize("ab\0c", true)));
      System.out.println(refused(() -> session.tokenize("ab\ud83d", true)));
      System.out.println(refused(() -> session.tokenize("\ude00\ud83d", true)));
      System.out.println(refused(() -> session.tokenize(null, true)));
      System.out.println(Arrays.equals(session.tokenize("\ud83d\ude00", true), session.tokenize(new String(Character.toChars(0x1f600)), true)));
      Session.Options plain = new Session.Options();
      System.out.println(refused(() -> session.generateText("a\0b", plain, piece -> true)));
      System.out.println(refused(() -> session.chat(question, null, plain, piece -> true)));
      System.out.println(refused(() -> session.generateText(question, null, piece -> true)));
      System.out.println(refused(() -> session.generateText(question, plain, null)));
      System.out.println(refused(() -> session.generate(null, plain, token -> true)));
      System.out.println(refused(() -> session.generate(prompt, plain, null)));
      plain.stopStrings = new String[] {"a", "\ud83d"};
      System.out.println(refused(() -> session.generateText(question, plain, piece -> true)));
      plain.stopStrings = new String[] {null};
      System.out.println(refused(() -> session.generateText(question, plain, piece -> true)));
      plain.stopStrings = null;
      System.out.println(refused(() -> session.generateText(question, plain, piece -> true)));
      plain.stopStrings = new String[] {};
      plain.stopTokens = null;
      System.out.println(refused(() -> session.generateText(question, plain, piece -> true)));
      System.out.println(refused(() -> session.saveState(state + "\0x")));
      System.out.println(refused(() -> new Session(null)));
      System.out.println(session.length());
    }
    try {
      closed.length();
    } catch (IllegalStateException failure) {
      System.out.println(failure.getMessage());
    }
  }
}
