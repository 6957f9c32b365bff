// Main program of llama-perplexity for tests/regression/test_perplexity.py. Beside its own source it is linked with
// common.cpp and log.cpp of llama-common, of which all would take two minutes to compile. So options are read here, and
// what is left out is what only samplers, drafts and cards need: no result depends on it.
#include "arg.h"
#include "common.h"
#include "fit.h"
#include "log.h"
#include "sampling.h"

#include <fstream>
#include <map>
#include <sstream>
#include <string>

int llama_perplexity(int argc, char ** argv);

bool common_params_parse(
        int argc, char ** argv, common_params & params, llama_example, void (*)(int, char **)) {
    std::map<std::string, std::string> given;
    for (int i = 1; i < argc; i += 2) {
        given[argv[i]] = i + 1 < argc ? argv[i + 1] : ""; // --kl-divergence is the last one
    }
    params.model.path = given.at("-m");
    params.n_ctx = std::stoi(given.at("-c"));
    params.n_batch = std::stoi(given.at("-b"));
    params.cpuparams.n_threads = std::stoi(given.at("-t"));
    postprocess_cpu_params(params.cpuparams_batch, &params.cpuparams);
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.no_extra_bufts = true; // --no-repack
    params.swa_full = true;
    params.fit_params = false;
    params.warmup = false;
    if (given.count("--chunks")) {
        params.n_chunks = std::stoi(given.at("--chunks"));
    }
    if (given.count("-f")) {
        std::stringstream text;
        text << std::ifstream(given.at("-f"), std::ios::binary).rdbuf();
        params.prompt = text.str();
    }
    if (given.count("--kl-divergence-base")) {
        params.logits_file = given.at("--kl-divergence-base");
    }
    if (given.count("--kl-divergence")) {
        params.kl_divergence = true;
    }
    if (given.count("-ctk")) {
        params.cache_type_k = params.cache_type_v = GGML_TYPE_Q8_0;
    }
    return true;
}

common_sampler * common_sampler_init(const llama_model *, common_params_sampling &) {
    return nullptr;
}

llama_sampler * common_sampler_get(const common_sampler *) {
    return nullptr;
}

void common_sampler_free(common_sampler *) {}

void common_memory_breakdown_print(const llama_context *) {}

int main(int argc, char ** argv) {
    const int code = llama_perplexity(argc, argv);
    common_log_flush(common_log_main()); // its own main may end before the last lines are written
    return code;
}
