//! Fuzzes `skysail_fuzz::http2`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::http2(data));
