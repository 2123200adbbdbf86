//! Fuzzes `skysail_fuzz::yaml`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::yaml(data));
