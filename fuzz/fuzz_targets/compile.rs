//! Fuzzes `skysail_fuzz::compile`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::compile(data));
