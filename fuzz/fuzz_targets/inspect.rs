//! Fuzzes `skysail_fuzz::inspect`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::inspect(data));
