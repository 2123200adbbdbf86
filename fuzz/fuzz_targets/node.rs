//! Fuzzes `skysail_fuzz::node`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::node(data));
