//! Fuzzes `skysail_fuzz::dns`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::dns(data));
