# How scripts/test builds unpatched llama.cpp: llama and mtmd in half of the time. Their results are the same, as neither
# has flags that let a compiler round otherwise. ggml keeps our flags, as its kernels take all the time of a test.
function(moegraph_quick)
    target_compile_options(llama PRIVATE -O1)
    target_compile_options(mtmd PRIVATE -O0)
    # as llama has it: models share a compiler's reading of headers
    get_target_property(sources mtmd SOURCES)
    list(FILTER sources EXCLUDE REGEX "^models/")
    get_target_property(folder mtmd SOURCE_DIR)
    list(TRANSFORM sources PREPEND "${folder}/")
    set_target_properties(mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
    set_source_files_properties(${sources} TARGET_DIRECTORY mtmd PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
cmake_language(DEFER CALL moegraph_quick)
