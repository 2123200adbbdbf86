//! Fuzzes `skysail_fuzz::path`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::path(data));
