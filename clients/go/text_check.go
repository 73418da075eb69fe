// Refuses text that the wire cannot carry before it is sent, with the field's path; gRPC would only
// say that something can't be marshalled.

package headrace

import (
	"fmt"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// checkText returns an [ErrInvalid] that names the first field of message, at any depth, whose
// string is not UTF-8.
func checkText(message proto.Message) error {
	if failure := checkFields(message.ProtoReflect(), ""); failure != nil {
		return failure
	}
	return nil
}

func checkFields(message protoreflect.Message, prefix string) (failure *Error) {
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		path := prefix + string(field.Name())
		switch {
		case field.IsMap(): // their keys and values are numbers
		case field.IsList():
			for i := 0; i < value.List().Len() && failure == nil; i++ {
				failure = checkValue(field, value.List().Get(i), fmt.Sprintf("%s[%d]", path, i))
			}
		default:
			failure = checkValue(field, value, path)
		}
		return failure == nil
	})
	return failure
}

func checkValue(field protoreflect.FieldDescriptor, value protoreflect.Value, path string) *Error {
	switch field.Kind() {
	case protoreflect.MessageKind:
		return checkFields(value.Message(), path+".")
	case protoreflect.StringKind:
		if !utf8.ValidString(value.String()) {
			return invalid(path, fmt.Sprintf("must be UTF-8 (given: %.40q)", value.String()))
		}
	}
	return nil
}
