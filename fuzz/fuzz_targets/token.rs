//! Fuzzes `skysail_fuzz::token`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::token(data));
