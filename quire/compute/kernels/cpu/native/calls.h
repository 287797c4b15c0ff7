// Calls as data: every kernel has a second entry that takes its arguments from an array, so that a list of calls can be
// replayed without the interpreter.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace quire {

using Entry = void (*)(const uint64_t* arguments);

template <auto Kernel>
struct Called;

template <class... Arguments, void (*Kernel)(Arguments...)>
struct Called<Kernel> {
    static void by(const uint64_t* arguments) { spread(arguments, std::index_sequence_for<Arguments...>()); }

   private:
    template <class T>
    static T read(uint64_t word) {  // its first bytes, as ctypes stores them
        T value;
        std::memcpy(&value, &word, sizeof(T));
        return value;
    }

    template <size_t... I>
    static void spread(const uint64_t* arguments, std::index_sequence<I...>) {
        Kernel(read<Arguments>(arguments[I])...);
    }
};

}  // namespace quire

// The second entry of the kernel quire_<name>.
#define QUIRE_ENTRY(name)                                                       \
    extern "C" void quire_entry_##name(const uint64_t* arguments) {             \
        quire::Called<quire_##name>::by(arguments);                             \
    }
