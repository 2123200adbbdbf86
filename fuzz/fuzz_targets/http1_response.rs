//! Fuzzes `skysail_fuzz::http1_response`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::http1_response(data));
