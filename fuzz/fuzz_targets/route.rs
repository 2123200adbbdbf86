//! Fuzzes `skysail_fuzz::route`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::route(data));
