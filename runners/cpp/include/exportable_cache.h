/* The C interface of the runner: for languages that call C, and programs that load a library.
 *
 * The interface is stable: names keep their meaning and layout, and structures begin with their size and grow at their end.
 *
 * Every function that can fail returns an ec_status; ec_error() then has a message with the value, the limit and the remedy.
 * Texts are UTF-8 and end with a zero byte. A session is used by one thread at a time, except for ec_cancel. A null pointer
 * where a value is needed is EC_INPUT, never a crash. Closed sessions and invalid memory cannot be detected.
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

/* Grows with each addition; another upper half means that callers have to be compiled again. */
#define EC_ABI_VERSION 0x0001000Bu

typedef struct ec_session ec_session;

typedef enum ec_status {
  EC_OK = 0,
  EC_INPUT = 1,      /* invalid argument: token out of range, empty prompt, unreadable file, ... */
  EC_CACHE_FULL = 2, /* not enough slots for the tokens */
  EC_BUNDLE = 3,     /* the bundle is missing, damaged, or not supported by this library */
  EC_RUNTIME = 4     /* ExecuTorch reported an error while it ran the program */
} ec_status;

typedef enum ec_stop {
  EC_STOP_END_TOKEN = 0,
  EC_STOP_STRING = 1,
  EC_STOP_MAX_NEW_TOKENS = 2,
  EC_STOP_CACHE_FULL = 3,
  EC_STOP_CALLBACK = 4,
  EC_STOP_CANCELLED = 5,
  EC_STOP_WHOLE = 6 /* allowed_tokens ended it */
} ec_stop;

/* Dtype of a tensor's values. */
typedef enum ec_dtype {
  EC_FLOAT32 = 0,
  EC_INT64 = 1
} ec_dtype;

/* Called once before each choice: set bit b of mask[w] if token 32 * w + b is allowed. All bits are 0 before. `tokens` are the `count`
 * tokens chosen so far, without the prompt. Return 1; 0 if the response is complete, which ends the generation; a negative number on
 * failure, which ends it with EC_INPUT, as does a mask that allows no token. Text returned before stays valid. The mask has the format
 * of llguidance and XGrammar. */
typedef int (*ec_allow_tokens)(const int64_t* tokens, size_t count, uint32_t* mask, size_t words, void* user);

/* Log probabilities under the model, before temperature, rules and masks: of the token that on_token is called with next, and of the
 * `count` most probable tokens, in order. */
typedef void (*ec_on_logprobs)(double logprob, const int64_t* tokens, const double* logprobs, size_t count, void* user);

/* Options of a generation. Fill it with ec_options_init first. */
typedef struct ec_options {
  size_t size;                     /* of this structure, as the caller compiled it */
  int64_t max_new_tokens;          /* 0: the checkpoint's limit, otherwise as many as fit */
  double temperature;              /* 0: always the most probable token */
  int64_t top_k;                   /* 0: no limit */
  double top_p;                    /* 1: no limit */
  uint64_t seed;                   /* of the draws, if has_seed */
  int32_t has_seed;
  int32_t reserved;
  const int64_t* stop_tokens;      /* in addition to the model's end tokens */
  size_t stop_token_count;
  const char* const* stop_strings; /* end the text, and are not returned */
  size_t stop_string_count;
  int64_t prompt_lookup;           /* most tokens proposed per step from the text itself; 0: none */
  ec_allow_tokens allowed_tokens;  /* null: all are allowed */
  void* allowed_user;              /* passed to allowed_tokens */
  double min_p;                    /* 0: no limit; otherwise only tokens at least min_p times as probable as the most probable one */
  double repetition_penalty;       /* 0: the checkpoint's; above 1, tokens of the prompt and the generation become less likely */
  int64_t cached_tokens;           /* 0: the prompt follows the cached tokens; N: its first N are cached, and later ones are rolled back */
  ec_on_logprobs on_logprobs;      /* null: not called */
  void* logprobs_user;             /* passed to on_logprobs */
  int64_t alternatives;            /* most probable tokens that on_logprobs gets */
  int32_t from_checkpoint;         /* 1: sample as the checkpoint's generation_config says, if it has do_sample. temperature 0, top_k 0,
                                      top_p 1 and min_p 0 are then its values, and others replace them */
  int32_t shift_when_full;         /* 1: drop half of the tokens after the protected ones when the cache is full, and continue */
  int64_t protected_tokens;        /* first tokens that shifts keep */
  const int64_t* bias_tokens;      /* token ids, and numbers that are added to their logits */
  const double* bias_values;
  size_t bias_count;
  double presence_penalty;         /* subtracted from the logits of tokens that were generated */
  double frequency_penalty;        /* subtracted from a token's logit each time that it was generated */
  const int64_t* counted_tokens;   /* tokens of earlier calls that count as generated */
  size_t counted_token_count;
  int64_t draft_tokens;            /* most tokens proposed per step by the bundle's draft head, at most 15; 0: none */
} ec_options;

/* Result of a generation; times in seconds. */
typedef struct ec_statistics {
  size_t size; /* of this structure, as the caller compiled it */
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
/* A piece of text of `size` bytes, which never ends inside a character and is followed by a zero byte. */
typedef int (*ec_on_text)(const char* piece, size_t size, void* user);

/* EC_ABI_VERSION of the library. */
EC_API uint32_t ec_abi_version(void);

/* Message of the thread's last call if that failed, otherwise "". Valid until the thread's next call. */
EC_API const char* ec_error(void);

/* Set the compute threads of all sessions in this process, 1 to 512; the default is the number of cores. Call it before the first
 * session is opened: changing the number while one is open is EC_INPUT. No other call of this library may run at the same time. */
EC_API ec_status ec_set_threads(int64_t threads);

/* Open the bundle in a folder, at position 0. */
EC_API ec_status ec_open(const char* folder, ec_session** session);

/* Close a session; null does nothing. */
EC_API void ec_close(ec_session* session);

/* Feed tokens after the cached ones. `logits` [vocab], if not null, are valid until the session's next call. */
EC_API ec_status ec_prefill(ec_session* session, const int64_t* tokens, size_t count, const float** logits, size_t* vocab);

/* Encode an encoder-decoder's input: token ids, or the values that a speech model's processor makes, last dimension innermost.
 * The decoder starts again at position 0. */
EC_API ec_status ec_encode_tokens(ec_session* session, const int64_t* tokens, size_t count);
EC_API ec_status ec_encode_values(ec_session* session, const float* values, size_t count);

/* Add an image, video or audio for the next prompt: one tensor of the model's processor by its name, such as "pixel_values", with
 * `dims` sizes in `shape`. `dtype` is an ec_dtype. The prompt has the placeholder token once per embedding; ec_reset drops what was
 * added. */
EC_API ec_status ec_add_input(ec_session* session, const char* name, const void* data, int dtype, const int64_t* shape, size_t dims);

/* Roll back the newest tokens. */
EC_API ec_status ec_rewind(ec_session* session, int64_t tokens);

/* Drop `count` tokens from position `first` on; later tokens move to lower positions. Since version 1.7. */
EC_API ec_status ec_shift(ec_session* session, int64_t count, int64_t first);

/* Start again at position 0. */
EC_API ec_status ec_reset(ec_session* session);

/* Number of cached tokens, and the limit (-1: none). */
EC_API ec_status ec_length(const ec_session* session, int64_t* held, int64_t* most);

/* Set the defaults: greedy, as many tokens as fit. `size` is sizeof(ec_options). */
EC_API void ec_options_init(ec_options* options, size_t size);

/* Generate tokens after a prompt. `options`, `on_token` and `statistics` may be null; set statistics->size. */
EC_API ec_status ec_generate(ec_session* session, const int64_t* prompt, size_t count, const ec_options* options,
                             ec_on_token on_token, void* user, ec_statistics* statistics);

/* Generate text after a text, which continues what is cached. */
EC_API ec_status ec_generate_text(ec_session* session, const char* prompt, const ec_options* options, ec_on_text on_text,
                                  void* user, ec_statistics* statistics);

/* Respond to a question, with the model's chat template; the conversation continues what is cached. `system` may be null; it comes
 * before the first question only. */
EC_API ec_status ec_chat(ec_session* session, const char* question, const char* system, const ec_options* options, ec_on_text on_text,
                         void* user, ec_statistics* statistics);

/* Load a LoRA adapter of `exportable-cache adapter` into a slot, under a name; free the slot; run the next steps with it (null: the
 * model itself). Needs a bundle exported with lora_slots. Since version 1.10. */
EC_API ec_status ec_load_adapter(ec_session* session, const char* path, const char* name);
EC_API ec_status ec_unload_adapter(ec_session* session, const char* name);
EC_API ec_status ec_use_adapter(ec_session* session, const char* name);

/* The model's chat template over a request, JSON in UTF-8: the messages, or an object with "messages", "tools" and other variables of
 * the template. `on_text` is called once. EC_BUNDLE if the library was built without -DEC_TEMPLATES=ON. Since version 1.8. */
EC_API ec_status ec_render(ec_session* session, const char* request, ec_on_text on_text, void* user);

/* Respond to a request with the whole conversation, see ec_render; cached tokens of an earlier one are not fed again. Since
 * version 1.8. */
EC_API ec_status ec_chat_messages(ec_session* session, const char* request, const ec_options* options, ec_on_text on_text, void* user,
                                  ec_statistics* statistics);

/* Token ids of a text, which are not fed; `starts` if it begins a sequence. `count` is set to their number; at most `capacity` are
 * written. */
EC_API ec_status ec_tokenize(ec_session* session, const char* text, int starts, int64_t* tokens, size_t capacity, size_t* count);

/* End the running generation, from any thread; without one it does nothing. */
EC_API void ec_cancel(ec_session* session);

/* Save the session's state to a file, and load it, with the same bundle only. */
EC_API ec_status ec_save_state(const ec_session* session, const char* path);
EC_API ec_status ec_load_state(ec_session* session, const char* path);

#ifdef __cplusplus
}
#endif

#endif
