/* The C interface of the runner: for languages that call C, and programs that load a library.
 *
 * Stable: what is here keeps its meaning and its layout; structures begin with their size and grow at their end.
 *
 * Every function that can fail returns an ec_status; ec_error() has the sentence then, with the value, the limit and the remedy.
 * Texts are UTF-8 and end with a zero byte. A session is used by one thread at a time, but for ec_cancel. Null where something
 * is needed is EC_INPUT, never a crash; a session that was closed, or memory that is not there, cannot be seen.
 */
#ifndef EXPORTABLE_CACHE_H
#define EXPORTABLE_CACHE_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define EC_API __declspec(dllexport)
#else
#define EC_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Grows when something is added; another first half means that callers have to be compiled again. */
#define EC_ABI_VERSION 0x00010003u

typedef struct ec_session ec_session;

typedef enum ec_status {
  EC_OK = 0,
  EC_INPUT = 1,      /* a wrong argument: token out of range, empty prompt, a file that cannot be read, ... */
  EC_CACHE_FULL = 2, /* there are no slots for the tokens */
  EC_BUNDLE = 3,     /* the bundle is missing, damaged, or not one this library runs */
  EC_RUNTIME = 4     /* ExecuTorch reported an error while it ran the program */
} ec_status;

typedef enum ec_stop {
  EC_STOP_END_TOKEN = 0,
  EC_STOP_STRING = 1,
  EC_STOP_MAX_NEW_TOKENS = 2,
  EC_STOP_CACHE_FULL = 3,
  EC_STOP_CALLBACK = 4,
  EC_STOP_CANCELLED = 5,
  EC_STOP_WHOLE = 6 /* allowed_tokens said so */
} ec_stop;

/* What the values of a tensor are. */
typedef enum ec_dtype {
  EC_FLOAT32 = 0,
  EC_INT64 = 1
} ec_dtype;

/* Called once before each choice: set bit b of mask[w] where token 32 * w + b may come next. All are 0 before. `tokens` are the `count`
 * that were chosen so far, the prompt not among them. Return 1; 0 where the answer is whole, which ends the generation; less where
 * it failed, which ends it with EC_INPUT, as a mask that allows no token does: what was given out stays. The masks of llguidance and
 * XGrammar are of this form. */
typedef int (*ec_allow_tokens)(const int64_t* tokens, size_t count, uint32_t* mask, size_t words, void* user);

/* How tokens are generated. Fill it with ec_options_init first. */
typedef struct ec_options {
  size_t size;                     /* of this structure, as the caller knows it */
  int64_t max_new_tokens;          /* 0: the checkpoint's own limit, or else as many as fit */
  double temperature;              /* 0: always the likeliest token */
  int64_t top_k;                   /* 0: all */
  double top_p;                    /* 1: all */
  uint64_t seed;                   /* the same draws every time, if has_seed */
  int32_t has_seed;
  int32_t reserved;
  const int64_t* stop_tokens;      /* besides the model's end tokens */
  size_t stop_token_count;
  const char* const* stop_strings; /* that end the text, and are not given out */
  size_t stop_string_count;
  int64_t prompt_lookup;           /* most tokens proposed a step from the text itself; 0: none */
  ec_allow_tokens allowed_tokens;  /* null: all may come */
  void* allowed_user;              /* what it is called with */
} ec_options;

/* What came of a generation; seconds. */
typedef struct ec_statistics {
  size_t size; /* of this structure, as the caller knows it */
  int64_t prompt_tokens;
  int64_t generated_tokens;
  double time_to_first_token;
  double decode_seconds;
  int64_t proposed_tokens;
  int64_t accepted_tokens;
  int32_t stop; /* an ec_stop */
  int32_t reserved;
} ec_statistics;

/* Return 0 to end the generation. */
typedef int (*ec_on_token)(int64_t token, void* user);
/* A piece of text of `size` bytes, which never ends inside a character, and has a zero byte behind it. */
typedef int (*ec_on_text)(const char* piece, size_t size, void* user);

/* EC_ABI_VERSION of the library. */
EC_API uint32_t ec_abi_version(void);

/* What the last call of this thread that failed has to say; "" if none did. Valid until the thread's next call. */
EC_API const char* ec_error(void);

/* Threads that compute, in all sessions of this process, from 1 to 512; as many as there are cores until then. Before the first
 * session is opened: EC_INPUT for another number while one is open. No other call of this library may run meanwhile. */
EC_API ec_status ec_set_threads(int64_t threads);

/* Open the bundle in a folder, at position 0. */
EC_API ec_status ec_open(const char* folder, ec_session** session);

/* Close a session; null does nothing. */
EC_API void ec_close(ec_session* session);

/* Feed tokens after those that are held. `logits` [vocab], if not null, are valid until the session's next call. */
EC_API ec_status ec_prefill(ec_session* session, const int64_t* tokens, size_t count, const float** logits, size_t* vocab);

/* Give an encoder-decoder its input: token ids, or the numbers that a speech model's processor makes, the last dimension
 * innermost. The decoder begins anew. */
EC_API ec_status ec_encode_tokens(ec_session* session, const int64_t* tokens, size_t count);
EC_API ec_status ec_encode_values(ec_session* session, const float* values, size_t count);

/* Hold an image, a video or a piece of sound for the next prompt: a tensor that the model's processor gives, by its name there, such
 * as "pixel_values", with `dims` sizes in `shape`. `dtype` is an ec_dtype. The prompt has the placeholder token once for each
 * embedding; ec_reset drops what was added. */
EC_API ec_status ec_add_input(ec_session* session, const char* name, const void* data, int dtype, const int64_t* shape, size_t dims);

/* Take back the newest tokens. */
EC_API ec_status ec_rewind(ec_session* session, int64_t tokens);

/* Start anew at position 0. */
EC_API ec_status ec_reset(ec_session* session);

/* Tokens that are held, and that can be held in all (-1: any number). */
EC_API ec_status ec_length(const ec_session* session, int64_t* held, int64_t* most);

/* Greedy choice, all that fits. `size` is sizeof(ec_options). */
EC_API void ec_options_init(ec_options* options, size_t size);

/* Tokens that follow a prompt. `options`, `on_token` and `statistics` may be null; set statistics->size. */
EC_API ec_status ec_generate(ec_session* session, const int64_t* prompt, size_t count, const ec_options* options,
                             ec_on_token on_token, void* user, ec_statistics* statistics);

/* Text that follows a text, which goes on from what is held. */
EC_API ec_status ec_generate_text(ec_session* session, const char* prompt, const ec_options* options, ec_on_text on_text,
                                  void* user, ec_statistics* statistics);

/* The answer to a question, in the turns of the model's chat template: the conversation goes on from what is held. `system` may be
 * null; it comes before the first question only. */
EC_API ec_status ec_chat(ec_session* session, const char* question, const char* system, const ec_options* options, ec_on_text on_text,
                         void* user, ec_statistics* statistics);

/* Token ids of a text, which are not fed; `starts` if it is the first of a sequence. `count` is set to how many there are; at most `capacity` are
 * written. */
EC_API ec_status ec_tokenize(ec_session* session, const char* text, int starts, int64_t* tokens, size_t capacity, size_t* count);

/* End the generation that is running, from any thread; without one it does nothing. */
EC_API void ec_cancel(ec_session* session);

/* Write where a session is to a file, and go there again: with the same bundle only. */
EC_API ec_status ec_save_state(const ec_session* session, const char* path);
EC_API ec_status ec_load_state(ec_session* session, const char* path);

#ifdef __cplusplus
}
#endif

#endif
