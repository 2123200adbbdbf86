//! Fuzzes `skysail_fuzz::http1_request`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::http1_request(data));
