//! Fuzzes `skysail_fuzz::hpack`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::hpack(data));
